"""The engine's process with a tiny random model of a family: `spawn_family` starts it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial

import torch

from site_engine.config import SiteConfig
from site_engine.engine.build import packed_engine
from site_engine.engine.loading import Loaded, facts_of
from site_engine.engine.settings import EngineSettings
from site_engine.engine_process import end, main
from site_engine.text.detokenize import TokenNames
from tests.support.engine_models import family
from tests.support.forked import fork

spawn_family = partial(fork, "tests.support.family_process")


def load_family(config: SiteConfig, *, with_text: bool = True) -> Loaded:
    torch.set_num_threads(1)
    model = family(config.model).served
    if not with_text:
        model = replace(model, vocabulary=TokenNames())
    settings = EngineSettings(
        slots=config.slots or 8,
        token_budget=config.token_budget,
        page_size=config.page_size,
        kv_tokens=config.kv_tokens,
        max_pending=config.max_pending,
    )
    engine = packed_engine(model, settings, time.monotonic)
    return Loaded(engine, model.tokenizer, facts_of(model, engine), open_inbox=engine.inbox.open)


if __name__ == "__main__":
    end(main(int(sys.argv[1]), lambda config: load_family(config, with_text=False)))
