"""The contract of an engine, checked against the tests' fake and the native one alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from site_engine.core.request import Finish, Output, RejectionReason, Request, RequestRejected, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.engine_interface import Engine
from site_engine.engine.settings import EngineSettings
from site_engine.model import loader
from tests.support.site_fakes import CONTEXT_TOKENS, FakeEngine
from tests.support.site_gateway import Gateway, assign, serving, site_before
from wire import federation_pb2 as pb

SLOTS, PENDING = 2, 4


BOS = "!"


def letters(bos: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, so that ids are those of the fake. `bos` is put before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos is not None:
        special_tokens = [(bos, alphabet.index(bos))]
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=special_tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos)


@cache
def tiny_model() -> loader.LoadedModel:
    torch.set_num_threads(1)  # such matrices are too small to share
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=None,
        bos_token_id=None,
    )
    return loader.from_model(LlamaForCausalLM(config), letters(), name="letters", eos_token_ids=())


def native() -> Engine:
    settings = EngineSettings(slots=SLOTS, token_budget=8, page_size=4, kv_tokens=256, max_pending=PENDING)
    return packed_engine(tiny_model(), settings, time.monotonic)


def fake() -> Engine:
    return FakeEngine(slots=SLOTS, max_pending=PENDING)


@pytest.fixture(params=[fake, native])
def engine(request: pytest.FixtureRequest) -> Engine:
    make: Callable[[], Engine] = request.param
    return make()


def request(name: str, tokens: int | None = 4, length: int = 5) -> Request:
    return Request(name, list(range(65, 65 + length)), Sampling(max_tokens=tokens, temperature=0.0))


def drain(engine: Engine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def at_rest(engine: Engine, free: int) -> bool:
    load = engine.load()
    counts = (load.running, load.pending, load.token_load, load.kv_reserved_tokens, load.unread_tokens)
    return not any(counts) and load.kv_free_tokens == free and not engine.has_work


def test_every_request_ends_once_with_its_count(engine: Engine) -> None:
    free = engine.load().kv_free_tokens
    for i in range(4):
        engine.submit(request(f"r{i}", tokens=3 + i))
    outputs = drain(engine)
    for i in range(4):
        mine = [each for each in outputs if each.request_id == f"r{i}"]
        assert [each.finish for each in mine if each.finish] == [Finish.LENGTH]
        assert mine[-1].finish is Finish.LENGTH
        assert sum(len(each.token_ids) for each in mine) == mine[-1].completion_tokens == 3 + i
    assert at_rest(engine, free)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_cancel_ends_a_request_in_any_state_with_the_next_step(engine: Engine, steps: int) -> None:
    free = engine.load().kv_free_tokens
    engine.submit(request("a", tokens=30, length=20))
    generated = 0
    for _ in range(steps):
        generated += sum(len(each.token_ids) for each in engine.step())
    engine.cancel("a")
    engine.cancel("nobody")
    (output,) = engine.step()
    assert (output.request_id, output.finish, output.completion_tokens) == ("a", Finish.CANCELLED, generated)
    assert at_rest(engine, free)


def test_only_what_has_not_started_can_be_released_and_comes_back(engine: Engine) -> None:
    free = engine.load().kv_free_tokens
    requests = {name: request(name, 12) for name in ("a", "b", "c")}
    for each in requests.values():
        engine.submit(each)
    engine.step()  # whom it takes first is its own affair
    (waiting,) = engine.release([*requests, "nobody"])
    assert engine.load().pending == 0
    assert list(engine.release([*requests])) == []
    engine.submit(requests[waiting])
    finished = [each.request_id for each in drain(engine) if each.finish is Finish.LENGTH]
    assert sorted(finished) == ["a", "b", "c"]
    assert at_rest(engine, free)


def test_refusals_name_their_reason_and_leave_nothing(engine: Engine) -> None:
    free = engine.load().kv_free_tokens
    with pytest.raises(RequestRejected) as refused:
        engine.submit(request("long", length=CONTEXT_TOKENS))
    assert (refused.value.reason, refused.value.param) == (RejectionReason.CONTEXT_LENGTH, "prompt")
    for i in range(PENDING):
        engine.submit(request(f"r{i}"))
    with pytest.raises(RequestRejected) as refused:
        engine.submit(request("full"))
    assert refused.value.reason is RejectionReason.FULL
    drain(engine)
    assert at_rest(engine, free)


def test_the_native_engine_answers_a_gateway() -> None:
    async def scenario() -> None:
        engine = native()
        free = engine.load().kv_free_tokens
        async with (
            serving(Gateway()) as gateway,
            site_before(gateway, engine=engine, tokenizer=letters(), stepped=False),
        ):
            session = await gateway.linked()
            await session.send(**assign("a", "hello", max_tokens=5, logprobs=2, echo=True))
            await session.send(**assign("b", "hello", n=2, max_tokens=9, temperature=1.0, seed=3))
            await session.send(**assign("c", "goodbye", max_tokens=50))
            await session.wait_for("accepted", 3)
            await session.send(cancel=pb.Cancel(attempt_id="c"))
            assert await session.finished("a") == pb.Delta.LENGTH
            assert await session.finished("b", 0) == await session.finished("b", 1) == pb.Delta.LENGTH
            assert await session.finished("c") in {pb.Delta.CANCELLED, pb.Delta.LENGTH}
            check_echo(session.deltas("a"))
            for index in range(2):
                assert sum(len(each.token_ids) for each in session.deltas("b", index)) == 9
            await session.until(
                lambda: [load.kv_free_tokens for load in session.received("load")[-1:]] == [free]
            )
            assert session.deltas("a")[-1].HasField("timings")

    asyncio.run(scenario())


def test_an_echoed_prompt_has_no_bytes_of_a_bos_token() -> None:
    async def scenario() -> None:
        async with (
            serving(Gateway()) as gateway,
            site_before(gateway, engine=native(), tokenizer=letters(BOS), stepped=False),
        ):
            session = await gateway.linked()
            await session.send(**assign("a", "hello", max_tokens=2, logprobs=0, echo=True))
            assert await session.finished("a") == pb.Delta.LENGTH
            prompt = [each for delta in session.deltas("a") for each in delta.prompt_logprobs]
            assert [each.token for each in prompt] == [BOS, *"hello"]
            assert b"".join(each.raw for each in prompt) == b"hello"

    asyncio.run(scenario())


def check_echo(deltas: list[Any]) -> None:
    assert deltas[0].text.startswith("hello")
    assert [each.token for each in deltas[0].prompt_logprobs] == list("hello")
    assert deltas[0].prompt_logprobs[0].absent
    logprobs = [each for delta in deltas for each in delta.logprobs]
    assert len(logprobs) == 5
    assert all(len(each.top) == 2 and each.logprob < 0 for each in logprobs)
