"""Chats that arrive as in a trace are all answered, and a job is trained beside them."""

from __future__ import annotations

import time

import pytest

from bench.support.beside_chats import MAX_TOKENS, chats_of, engine_of, serve
from site_engine.core.slack import Deferral
from tests.support.engine_models import VOCAB, family
from tests.support.training import examples, trainer


@pytest.mark.parametrize("deferral", list(Deferral))
def test_every_chat_is_answered_beside_a_job(deferral: Deferral) -> None:
    model = family("llama").served
    chats = chats_of(None, 12, VOCAB)
    assert (chats[-1].at - chats[0].at) / (len(chats) - 1) == pytest.approx(1.0)
    assert all(1 < len(each.prompt) <= MAX_TOKENS and 1 < each.tokens <= MAX_TOKENS for each in chats)
    engine = engine_of(model, deferral)
    engine.training.begin("job", "acme", trainer(examples(6), model=model.model, clock=time.monotonic))
    served = serve(engine, chats, 0.002)
    assert len(served.first_s) == len(chats)
    assert len(served.between_s) == sum(each.tokens - 1 for each in chats)
    assert min(served.first_s) >= 0.0
    assert len(served.per_token_s) == len(chats)
