"""The engine's process with an engine without a model: `spawn_fake` starts it instead of the real one."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from site_engine.config import SiteConfig
from site_engine.core.inbox import InboxAddress
from site_engine.engine.loading import Loaded
from site_engine.engine.process_spawn import spawn
from site_engine.engine_process import end, main
from site_engine.errors import ConfigError
from site_engine.native import engine_settings
from site_engine.text.detokenize import ByteVocabulary
from tests.support.site_fakes import CONTEXT_TOKENS, VOCABULARY, FakeEngine, FakeTokenizer

spawn_fake = partial(spawn, (sys.executable, "-m", "tests.support.fake_engine_process"))
LETTERS = ByteVocabulary(
    [bytes([code]) for code in range(VOCABULARY)], [chr(code) for code in range(VOCABULARY)]
)
"""A token is a character, as `FakeTokenizer` has it."""
UNSERVABLE = "unservable"


def fake_settings(**settings: Any) -> dict[str, Any]:
    config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), **{"model": "letters", **settings})
    return engine_settings(config)


def load_fake(config: SiteConfig) -> Loaded:
    """`width` 0: the text of the engine's own outputs must not matter. `served_model`: how it wakes."""
    if config.model == UNSERVABLE:
        raise ConfigError("this model cannot be served")
    engine = FakeEngine(slots=config.slots or 2, max_pending=config.max_pending, width=0)
    facts = "letters", "r1", CONTEXT_TOKENS, VOCABULARY
    sleeper = FakeSleeper(Path(config.served_model)) if config.sleep == "host" else None
    inbox = InboxAddress("letters", 1)
    return Loaded(
        engine, FakeTokenizer(), *facts, slots=engine.slots, sleeper=sleeper, open_inbox=lambda: inbox
    )


class FakeSleeper:
    """Does at each wake what a file says: `hang`, or give any other reason for which it can't."""

    def __init__(self, says: Path) -> None:
        self._says = says

    def sleep(self) -> str:
        return ""

    def wake(self) -> str:
        said = self._says.read_text() if self._says.is_file() else ""
        if said == "hang":
            threading.Event().wait()
        return said


if __name__ == "__main__":
    end(main(int(sys.argv[1]), load_fake))
