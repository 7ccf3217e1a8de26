"""Run a gateway as several processes behind one port: replicas of one configuration, ended together."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import NamedTuple

from gateway import app
from gateway.config import ConfigError, GatewayConfig
from gateway.store.errors import StoreError
from gateway.store.store import store_unread_journals
from gateway.telemetry import logs

log = logging.getLogger(__name__)

RESTART_S, MAX_RESTART_S = 1.0, 30.0
"""Pauses before a worker that has ended by itself is started again: the longer the more often it has."""


class Worker(NamedTuple):
    """A process, and the pipe that says why it could not serve."""

    process: SpawnProcess
    failure: Connection
    first: bool
    started_s: float


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT with as many processes as `workers` says; return the exit code.

    Raises ConfigError, StoreError.
    """
    asyncio.run(store_unread_journals(config.database_url, config.folder, config.workers))
    if config.workers == 1:
        return app.run(config)
    logs.configure(config.log_level)
    _check_free(config.host, config.http_port)
    return Workers(config).run()


class Workers:
    """Starts the workers, starts one again that died, and ends all of them together."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._live: dict[int, Worker] = {}
        self._again: dict[int, float] = {}  # when to start which, monotonic seconds
        self._pauses_s: dict[int, float] = {}  # the last one of each
        self._failure: Exception | None = None
        self._stopping = False
        self._code = 0

    def run(self) -> int:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._on_signal)
        try:
            for number in range(1, self._config.workers + 1):
                self._start(number, first=True)
            while self._live or (self._again and not self._stopping):
                self._watch()
        finally:
            self._stop()
        if self._failure is not None:
            raise self._failure
        return self._code

    def _watch(self) -> None:
        wait([each.process.sentinel for each in self._live.values()], timeout=RESTART_S)
        for number in [number for number, each in self._live.items() if not each.process.is_alive()]:
            self._ended(number)
        for number in [number for number, at in self._again.items() if time.monotonic() >= at]:
            del self._again[number]
            if self._stopping:
                continue
            try:
                self._start(number)
            except OSError:  # no memory, process or file descriptor is left
                log.exception("worker %d can't start now; it is tried again", number)
                self._start_later(number, lived_s=0.0)

    def _start(self, number: int, *, first: bool = False) -> None:
        spawn = multiprocessing.get_context("spawn")
        failure, writing = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=_work, args=(self._config.of_worker(number), writing), name=f"worker {number}"
        )
        with writing:
            try:
                process.start()
            except OSError:
                failure.close()
                raise
        self._live[number] = Worker(process, failure, first, time.monotonic())
        if self._stopping:  # a signal came meanwhile
            process.terminate()

    def _ended(self, number: int) -> None:
        """Note the end of a worker. One that cannot serve at its first start ends all, since none could."""
        worker = self._live.pop(number)
        with worker.failure as pipe:
            try:
                failure = pipe.recv()
            except EOFError:  # it served
                failure = None
        code = worker.process.exitcode
        if self._stopping:
            self._code = self._code or int(code not in (0, -signal.SIGTERM))
        elif failure is not None and worker.first:
            self._failure = failure
            self._stop()
        else:
            log.error("worker %d ended with code %s; it starts again", number, code, exc_info=failure)
            self._start_later(number, time.monotonic() - worker.started_s)

    def _start_later(self, number: int, lived_s: float) -> None:
        pause_s = restart_pause_s(self._pauses_s.get(number, 0.0), lived_s)
        self._pauses_s[number] = pause_s
        self._again[number] = time.monotonic() + pause_s

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for worker in self._live.values():
            worker.process.terminate()


def restart_pause_s(last_s: float, lived_s: float) -> float:
    """Return the pause before a worker starts again. One that keeps ending soon gets double the last pause:
    each start takes seconds of CPU from the workers that serve.
    """
    return RESTART_S if lived_s > MAX_RESTART_S else min(MAX_RESTART_S, max(RESTART_S, 2 * last_s))


def _work(config: GatewayConfig, failure: Connection) -> None:
    """Run one worker; what a single gateway raises goes to the first process."""
    try:
        code = app.run(config)
    except (ConfigError, StoreError) as exc:
        failure.send(exc)
        code = 1
    raise SystemExit(code)


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError for a port that another program has: among workers nobody would be told."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.create_server(address[:2], family=family):
                pass
    except OSError as exc:
        raise ConfigError(f"clients can't ask at {host}:{port}: taken, or not of this machine") from exc
