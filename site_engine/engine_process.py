"""The engine's process: `python -m site_engine.engine_process DESCRIPTOR`, a file descriptor of the site's
socket.

Loads the model named by the first message, then serves it until the site sends Stop or disconnects. Started
by `site_engine/engine/process_client.py`, not by hand.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

from site_engine.config import SiteConfig, VariantConfig
from site_engine.core.request import Grammar
from site_engine.core.startup import StartUp
from site_engine.engine import process_messages as pm
from site_engine.engine.child import end_with_parent, see_devices
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.loading import Loaded, grammars_of, load_engine
from site_engine.engine.process_server import EngineServer
from site_engine.engine.ranks import lead
from site_engine.errors import ConfigError, NotServed, Reason
from site_engine.first_import import first_import
from site_engine.optional_packages import UNUSED, hide
from site_engine.process_settings import set_up_collector, set_up_process
from site_engine.telemetry import logs
from site_engine.text.detokenize import TokenNames

if TYPE_CHECKING:
    from site_engine.text.grammar import Grammars

log = logging.getLogger("site_engine.engine_process")  # this module is run as __main__

Load: TypeAlias = Callable[[SiteConfig], Loaded]

MAX_OTHERS = 4
"""Cached vocabularies with end tokens that differ from the base's. Each takes 80 MB for 128,000 tokens."""
REASON_WITHIN_S = 1.0
"""How long a rank whose load failed waits for the reason of another rank that failed first, in seconds."""


def main(descriptor: int, load: Load | None = None, startup: StartUp | None = None) -> int:
    """Serve over an inherited socket. Return the exit status. `startup` has the parts of the start so far."""
    startup = startup or StartUp(time.monotonic)
    end_with_parent()
    set_up_process()
    leave_signals()
    connection = socket.socket(fileno=descriptor)
    start = read_start(connection)
    if start is None:
        return 1
    config = settings_to_config(start)
    logs.set_up(config.log_level, config.site)
    compiler, serving = GrammarCompiler(), threading.Event()

    def lost(reason: str) -> None:
        """End this process because a rank has ended. While the model loads, the site gets the reason."""
        log.critical("%s", reason)
        if not serving.is_set():
            connection.sendall(pm.frame(pm.Refused(reason)))
        end(1)

    def describe(tokenizer: Any, model: Described) -> None:
        """Send the site the facts for its tokenizer and read the vocabulary, while the engine is built."""
        compiler.begin(tokenizer, model, startup)
        described = pm.Described(model.context_tokens, model.vocab_size, model.eos_token_ids)
        connection.sendall(pm.frame(described))

    rank = lead(config, lost)
    try:
        device, sleep = see_devices([config.device.split("+")[0], config.sleep])
        config = replace(config, device=device, sleep=sleep)
        if load is None:
            loaded = load_engine(config, TokenNames(), startup, lambda it: describe(it.tokenizer, it), rank)
        else:
            loaded = load(config)
            describe(loaded.tokenizer, loaded.facts)
    except ConfigError as exc:
        if rank is not None:
            time.sleep(REASON_WITHIN_S)
        connection.sendall(pm.frame(pm.Refused(str(exc))))
        return 1
    make_thread = partial(EngineThread, loaded.engine, clock=time.monotonic, floor_s=config.iteration_floor_s)
    server = EngineServer(connection, make_thread, time.monotonic, compiler.compile, loaded.sleeper)
    compiler.wait()
    set_up_collector()
    serving.set()
    inbox = loaded.open_inbox() if start.with_others else None
    connection.sendall(pm.frame(pm.Ready(loaded.facts, startup.parts, inbox, loaded.shares)))
    log.info("the engine of %s runs in process %d", loaded.facts.name, os.getpid())
    return 0 if server.run() else 1


def leave_signals() -> None:
    """Ignore SIGINT and SIGTERM. The site's process receives them, too, and ends this one in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def read_start(connection: socket.socket) -> pm.Start | None:
    """Wait for the first message. Return None if the site has disconnected."""
    frames = pm.Frames()
    while data := connection.recv(1 << 16):
        for body in frames.feed(data):
            message = pm.decode_to_engine(body)
            assert isinstance(message, pm.Start), "the first message is Start"
            return message
    return None


def settings_to_config(message: pm.Start) -> SiteConfig:
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in message.settings.items()
    }
    settings["variants"] = tuple(VariantConfig(*each) for each in settings.get("variants", ()))
    return SiteConfig(**settings)


class Described(Protocol):
    """The facts of a model before its engine is built."""

    @property
    def context_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class GrammarCompiler:
    """Compiles grammars. A thread reads the vocabulary, which takes a second, while the engine is built."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "vocabulary")

    def begin(self, tokenizer: Any, model: Described, startup: StartUp) -> None:
        """Start reading the vocabulary."""
        self._model = model
        self._of_variants = lru_cache(MAX_OTHERS)(lambda ends: grammars_of(tokenizer, model.vocab_size, ends))

        def read() -> Grammars | None:
            with startup.part("engine's grammars"):
                return grammars_of(tokenizer, model.vocab_size, model.eos_token_ids)

        self._reading = self._thread.submit(read)

    def wait(self) -> None:
        """Wait until the vocabulary is read."""
        self._reading.result()
        self._thread.shutdown()

    def compile(self, source: str, eos_token_ids: tuple[int, ...] | None = None) -> Grammar:
        """Compile a grammar for the base, or for a variant with other end tokens. Raises NotServed."""
        grammars = self._reading.result()
        if eos_token_ids is not None and eos_token_ids != self._model.eos_token_ids:
            grammars = self._of_variants(eos_token_ids)
        if grammars is None:
            raise NotServed(Reason.UNSUPPORTED, "this engine can't hold an answer to a grammar")
        return grammars.compile(source, "response_format")


def end(status: int) -> NoReturn:
    """Exit at once, without waiting for running threads or for the interpreter's shutdown."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    leave_signals()
    hide(*UNUSED)
    began = StartUp(time.monotonic)
    with began.part("torch"), first_import("torch"):
        import torch  # noqa: F401 - while the site gets as far as to say what is to be loaded
    end(main(int(sys.argv[1]), startup=began))
