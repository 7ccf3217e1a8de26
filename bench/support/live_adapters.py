"""Adapters that come and go while an engine's rows are all busy: what each step takes then."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

from bench.support.variant_engines import Query, submit
from site_engine.core.chain import Chain, Variant
from site_engine.core.loader_turns import LoaderTurns
from site_engine.engine.engine import SiteEngine
from site_engine.model import certify as model_certify
from site_engine.variants import store
from site_engine.variants.certify import Certifier
from site_engine.variants.store import VariantStore

CALM_STEPS = 20  # after an adapter was removed
PARTS: tuple[tuple[Any, str], ...] = (
    (store, "read_adapter"),
    (store, "content_hash"),
    (VariantStore, "_loaded"),
    (Certifier, "_logits_alone"),
    (Certifier, "certify"),
    (model_certify, "largest_difference"),
)
"""What loading an adapter consists of, by the function that does it."""


class TimedStep(NamedTuple):
    what: str  # what else happened, from when the step began until it ended
    seconds: float  # from the end of the step before


class Traffic:
    """Keeps so many rows of an engine busy: a query that ends is followed by another of its chain.

    The first answers are of all lengths up to `tokens`, so that queries end at different times.
    """

    def __init__(
        self, engine: SiteEngine, chains: Sequence[str], rows: int, ask: Callable[[str], Query], tokens: int
    ) -> None:
        self.engine, self._ask, self._tokens = engine, ask, tokens
        self.loader_turns = LoaderTurns()
        self._chains: dict[str, str] = {}  # of running queries that are followed by others
        self._once: set[str] = set()  # running queries that are not
        self._count = 0
        draw = random.Random(3)
        for at in range(rows):
            self._submit(chains[at % len(chains)], draw.randrange(tokens // 8, tokens))

    def _submit(self, chain: str, tokens: int) -> None:
        self._count += 1
        self._chains[f"busy {self._count}"] = chain
        submit(self.engine, f"busy {self._count}", self._ask(chain), tokens)

    def ask_once(self, chain: str, tokens: int) -> None:
        self._count += 1
        self._once.add(f"once {self._count}")
        submit(self.engine, f"once {self._count}", self._ask(chain), tokens)

    @property
    def asked_once(self) -> bool:
        """Whether queries of `ask_once` are running."""
        return bool(self._once)

    def step(self) -> None:
        """Run a step, then a turn of the thread that loads, as the thread of an engine does."""
        for output in self.engine.step():
            assert not output.error, output.error
            if output.finish is not None:
                self._once.discard(output.request_id)
                if chain := self._chains.pop(output.request_id, ""):
                    self._submit(chain, self._tokens)
        self.loader_turns.give()

    def end(self) -> None:
        for name in (*self._chains, *self._once):
            self.engine.cancel(name)
        while self.engine.has_work:
            self.engine.step()


@contextmanager
def named_parts(engine: SiteEngine) -> Iterator[list[str]]:
    """Give a list whose last entry is the part of loading an adapter that some thread is at."""
    at = ["start"]
    with ExitStack() as undo:
        arenas = getattr(engine.runner, "_arenas", None)
        for owner, name in (*PARTS, *([] if arenas is None else [(type(arenas), "prepare")])):
            whole: Any = getattr(owner, name)
            undo.callback(setattr, owner, name, whole)
            setattr(owner, name, _named(at, name.strip("_"), whole))
        yield at


def _named(at: list[str], name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(whole)
    def part(*given: Any, **named: Any) -> Any:
        at.append(name)
        try:
            return whole(*given, **named)
        finally:
            at.pop()

    return part


def timed(traffic: Traffic, changes: Iterable[str]) -> list[TimedStep]:
    """Advance `changes` before each step until they end, as the thread of an engine does; time every pass."""
    steps = []
    with named_parts(traffic.engine) as at:
        lap_s = time.perf_counter()
        for what in changes:
            before = at[-1]
            traffic.step()
            now_s = time.perf_counter()
            parts = " ".join(dict.fromkeys((before, at[-1])))
            steps.append(TimedStep(f"{what}: {parts}" if what == "loading" else what, now_s - lap_s))
            lap_s = now_s
    return steps


def come_and_go(traffic: Traffic, added: Sequence[Variant], tokens: int) -> Iterator[str]:
    """Load each adapter on a thread, publish it, answer two queries, remove it; name what happens."""
    engine = traffic.engine
    with ThreadPoolExecutor(1) as loader:
        for variant in added:
            loaded: list[Callable[[], Chain]] = []
            load = partial(_load, engine, variant, loaded)
            loading = loader.submit(traffic.loader_turns.run, load)
            while not loading.done():
                yield "loading"
            loading.result()
            loaded[0]()
            for _ in range(2):
                traffic.ask_once(variant.id, tokens)
            yield "published"
            while traffic.asked_once:
                yield "in use"
            engine.remove_variant(variant.id)
            yield "removed"
            for _ in range(CALM_STEPS):
                yield "calm"


def _load(engine: SiteEngine, variant: Variant, loaded: list[Callable[[], Chain]]) -> None:
    loaded.append(engine.load_variant(variant))
