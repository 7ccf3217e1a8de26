"""The engine's process with an engine without a model: `FAKE_COMMAND` starts it instead of the real one."""

from __future__ import annotations

import sys
from typing import Any

from site_engine.config import SiteConfig
from site_engine.engine.loading import Loaded
from site_engine.engine_process import end, main
from site_engine.errors import ConfigError
from site_engine.native import engine_settings
from site_engine.text.detokenize import ByteVocabulary
from tests.support.site_fakes import CONTEXT_TOKENS, VOCABULARY, FakeEngine, FakeTokenizer

FAKE_COMMAND = (sys.executable, "-m", "tests.support.fake_engine_process")
LETTERS = ByteVocabulary(
    [bytes([code]) for code in range(VOCABULARY)], [chr(code) for code in range(VOCABULARY)]
)
"""A token is a character, as `FakeTokenizer` has it."""
UNSERVABLE = "unservable"


def fake_settings(**settings: Any) -> dict[str, Any]:
    config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), **{"model": "letters", **settings})
    return engine_settings(config)


def load_fake(config: SiteConfig) -> Loaded:
    """`width` 0: the text of the engine's own outputs must not matter."""
    if config.model == UNSERVABLE:
        raise ConfigError("this model cannot be served")
    engine = FakeEngine(slots=config.slots or 2, max_pending=config.max_pending, width=0)
    return Loaded(engine, FakeTokenizer(), "letters", "r1", CONTEXT_TOKENS, VOCABULARY, slots=engine.slots)


if __name__ == "__main__":
    end(main(int(sys.argv[1]), load_fake))
