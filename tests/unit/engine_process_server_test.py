"""Every request that reaches the engine's process is answered, whatever goes wrong with its grammar."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar

from site_engine.core.chain import Variant
from site_engine.core.request import Finish, Grammar, Request, Sampling
from site_engine.engine import process_messages as pm
from site_engine.engine import process_packing as packing
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_server import EngineServer
from tests.support.site_fakes import FakeEngine

T = TypeVar("T")
WITHIN_S = 20.0


class Schema:
    """A grammar as the site's process sends it."""

    source = "{}"

    def start(self) -> Any:
        raise AssertionError("guides are made in the engine's process")


def break_down(_source: str, _ends: object) -> Grammar:
    raise RuntimeError("out of memory")


def admission(site: socket.socket) -> pm.Admitted:
    return answer(site, pm.Admitted)


def answer(site: socket.socket, kind: type[T]) -> T:
    frames, until_s = pm.Frames(), time.monotonic() + WITHIN_S
    while time.monotonic() < until_s:  # the engine says every quarter of a second that it is alive
        for message in map(pm.decode_from_engine, frames.feed(site.recv(1 << 16))):
            if isinstance(message, kind):
                return message
    raise AssertionError("the engine has not answered")


@contextmanager
def served(engine: FakeEngine | None = None) -> Iterator[tuple[EngineServer, socket.socket]]:
    """Serve an engine whose compiler of grammars breaks; yield it and the site's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WITHIN_S)
    engine = engine or FakeEngine(slots=4)
    server = EngineServer(
        theirs, lambda post: EngineThread(engine, post, time.monotonic), time.monotonic, break_down
    )
    serving = Thread(target=server.run, daemon=True)
    serving.start()
    with ours, theirs:
        try:
            yield server, ours
        finally:
            ours.sendall(pm.frame(pm.Stop()))
            serving.join(WITHIN_S)
    assert not serving.is_alive()


def test_a_compiler_that_breaks_refuses_its_request_and_the_next_one_is_admitted() -> None:
    with served() as (_, site):
        guided = Request("guided", (97,), Sampling(max_tokens=2), grammar=Schema())
        site.sendall(pm.frame(packing.to_submit(1, [1], [guided])))
        refused = admission(site)
        assert (refused.call, refused.reason) == (1, "INTERNAL")
        site.sendall(pm.frame(pm.Cancel([1])))
        plain = Request("plain", (97,), Sampling(max_tokens=2))
        site.sendall(pm.frame(packing.to_submit(2, [2], [plain])))
        admitted = admission(site)
        assert (admitted.call, admitted.reason) == (2, "")


def test_nothing_is_kept_of_a_variant_that_was_removed() -> None:
    with served() as (server, site):
        for call in range(1, 4):
            site.sendall(pm.frame(pm.AddVariant(call, Variant("one", f"/srv/{call}"))))
            assert answer(site, pm.VariantAdded).chain is not None
            site.sendall(pm.frame(pm.RemoveVariant(call, "one")))
            assert not answer(site, pm.VariantRemoved).message
        assert server._ends == {}


def test_an_answer_that_its_text_ends_is_ended_in_the_engine_with_its_length() -> None:
    engine = FakeEngine(slots=0)
    with served(engine) as (_, site):
        site.sendall(pm.frame(packing.to_submit(1, [1], [Request("stops", (97,))])))
        assert admission(site).reason == ""
        site.sendall(pm.frame(pm.EndByText(1, 5)) + pm.frame(pm.EndByText(2, 7)))
        (ended,) = answer(site, pm.Step).details
        assert ended.finish is Finish.CANCELLED
        assert engine.lengths == {"stops": 5}
