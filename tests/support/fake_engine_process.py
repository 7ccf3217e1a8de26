"""The engine's process with an engine without a model: `spawn_fake` starts it instead of the real one."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from site_engine.config import SiteConfig
from site_engine.core.inbox import InboxAddress
from site_engine.engine.loading import Loaded
from site_engine.engine_process import end, main
from site_engine.errors import ConfigError
from site_engine.native import engine_settings
from site_engine.text.detokenize import ByteVocabulary
from tests.support.child_processes import is_there
from tests.support.forked import fork
from tests.support.site_fakes import VOCABULARY, FakeEngine, fake_loaded

spawn_fake = partial(fork, "tests.support.fake_engine_process")
LETTERS = ByteVocabulary(
    [bytes([code]) for code in range(VOCABULARY)], [chr(code) for code in range(VOCABULARY)]
)
"""A token is a character, as `FakeTokenizer` has it."""
UNSERVABLE = "unservable"
FREED_BYTES = 1000
FULL = "the device is full"


def fake_settings(**settings: Any) -> dict[str, Any]:
    config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), **{"model": "letters", **settings})
    return engine_settings(config)


def load_fake(config: SiteConfig) -> Loaded:
    """`width` 0: the text of the engine's own outputs must not matter. `served_model`: how it wakes."""
    if config.model == UNSERVABLE:
        raise ConfigError("this model cannot be served")
    engine = FakeEngine(slots=config.slots or 2, max_pending=config.max_pending, width=0)
    says = Path(config.served_model)
    sleeper = FakeSleeper(says, shares=config.share_sleeping_memory) if config.sleep == "host" else None
    inbox = InboxAddress("letters", 1)
    return fake_loaded(engine)._replace(sleeper=sleeper, open_inbox=lambda: inbox)


class FakeSleeper:
    """Does at each wake what a file says: `hang`, or give any other reason for which it can't.

    Engines whose files have one folder share a device. Beside its file each writes what it holds of others,
    or below 0 what others may hold of its own.
    """

    def __init__(self, says: Path, *, shares: bool) -> None:
        self._says = says
        self._holds = Path(f"{says}.{os.getpid()}")
        self.shares = hashlib.sha256(bytes(says.parent)).hexdigest() if shares else ""
        self.freed_bytes = 0

    def sleep(self) -> str:
        self.hold(-FREED_BYTES)
        self.freed_bytes = FREED_BYTES
        return ""

    def wake(self) -> str:
        said = self._says.read_text() if self._says.is_file() else ""
        if said == "hang":
            threading.Event().wait()
        if not said and self.shares and sum(holds(self._says.parent)) + FREED_BYTES > 0:
            return FULL
        if not said:
            self.freed_bytes = 0
            self.hold(0)
        return said

    def hold(self, extra_bytes: int) -> int:
        if self.shares and not self.freed_bytes:
            self._holds.write_text(str(extra_bytes))
        return extra_bytes


def holds(folder: Path) -> list[int]:
    """Return what the engines of a folder have written that have not ended."""
    written = [each for each in folder.iterdir() if each.suffix[1:].isdecimal()]
    alive = [each for each in written if is_there(int(each.suffix[1:]), as_zombie=False)]
    return [int(each.read_text() or 0) for each in alive]


if __name__ == "__main__":
    end(main(int(sys.argv[1]), load_fake))
