"""The engine's process: `python -m site_engine.engine_process DESCRIPTOR` of its end of the site's socket.

Loads the model of the first message, then serves it until the site says Stop or is gone. Started by
`site_engine/engine/process_client.py`; alone it is of no use.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from site_engine.config import SiteConfig
from site_engine.core.request import Grammar
from site_engine.engine import process_messages as pm
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_server import EngineServer
from site_engine.errors import ConfigError, NotServed, Reason
from site_engine.native import Loaded, facts_of, grammars_of, load_engine
from site_engine.telemetry import logs
from site_engine.text.detokenize import TokenNames

log = logging.getLogger("site_engine.engine_process")  # this module is run as __main__

PR_SET_PDEATHSIG = 1


def main(descriptor: int, load: Callable[[SiteConfig], Loaded] | None = None) -> int:
    """Serve over an inherited socket; return the exit status."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # for the site's process, which ends this one in order
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    config = read_start(connection)
    if config is None:
        return 1
    logs.set_up(config.log_level, config.site)
    try:
        loaded = load_engine(config, TokenNames()) if load is None else load(config)
    except ConfigError as exc:
        connection.sendall(pm.frame(pm.Refused(str(exc))))
        return 1
    server = EngineServer(
        connection,
        lambda post: EngineThread(loaded.engine, post, time.monotonic, config.iteration_floor_s),
        time.monotonic,
        compiler_of(loaded),
    )
    connection.sendall(pm.frame(pm.Ready(facts_of(loaded))))
    log.info("the engine of %s runs in process %d", loaded.name, os.getpid())
    return 0 if server.run() else 1


def end_with_parent() -> None:
    """Have this process killed when the one that started it ends, also where it hangs. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read_start(connection: socket.socket) -> SiteConfig | None:
    """Wait for the settings; return None if the site is gone."""
    frames = pm.Frames()
    while data := connection.recv(1 << 16):
        for body in frames.feed(data):
            message = pm.decode_to_engine(body)
            assert isinstance(message, pm.Start), "the first message is Start"
            return settings_to_config(message)
    return None


def settings_to_config(message: pm.Start) -> SiteConfig:
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in message.settings.items()
    }
    return SiteConfig(**settings)


def compiler_of(loaded: Loaded) -> Callable[[str], Grammar]:
    """Return the function that compiles grammars; the first call reads the vocabulary."""
    grammars = None

    def compile_grammar(source: str) -> Grammar:
        nonlocal grammars
        grammars = grammars or grammars_of(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        if grammars is None:
            raise NotServed(Reason.UNSUPPORTED, "this engine can't hold an answer to a grammar")
        return grammars.compile(source, "response_format")

    return compile_grammar


def end(status: int) -> NoReturn:
    """End at once: nobody waits for what still runs, nor for the interpreter to take itself apart."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    end(main(int(sys.argv[1])))
