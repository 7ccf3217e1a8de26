"""Random requests in two engines whose steps overlap answer as in one whose steps do not.

They have grammars and other rules, are cancelled, preempted and moved while a step is under way, and some
steps fail. Kernels run interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

from site_engine.core.request import Finish, Request
from site_engine.engine.engine import SiteEngine
from site_engine.text.grammar import Grammars
from tests.support.engine_models import family, tokenizer
from tests.support.moved_requests import Pair, alone, assert_same, random_request
from tests.support.overlapped_engines import overlapped

pytestmark = pytest.mark.slow

COUNT = 12
BY_CHANCE = "ValueError: by chance"


class Disturbed(Pair):
    """Ends requests at random; so many of its engines' steps, and of what queues their rules, fail."""

    def __init__(self, seed: int, *, ends: float, steps: float = 0, rules: float = 0, **more: int) -> None:
        super().__init__(seed, lambda: overlapped(family("llama"), **more))
        self.ends = ends
        self.ended: set[str] = set()
        self.failures = 0
        for engine in self.engines:
            runner: Any = engine.runner
            runner.play = self.failing(runner.play, steps)
            runner._ruled.sample = self.failing(runner._ruled.sample, rules)

    def failing(self, call: Callable[..., Any], chance: float) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if self.draw.random() < chance:
                self.failures += 1
                raise ValueError("by chance")
            return call(*args)

        return called

    def begin(self, engine: SiteEngine) -> None:
        super().begin(engine)
        if self.known and self.draw.random() < self.ends:
            name = self.draw.choice(list(self.known))
            self.ended.add(name)
            for each in self.engines:
                each.cancel(name) if self.draw.random() < 0.5 else each.end_by_text(name, 3)


KINDS: dict[str, dict[str, Any]] = {
    "few pages": {"ends": 0.05, "kv_tokens": 72},
    "steps fail": {"ends": 0.05, "kv_tokens": 96, "steps": 0.1},
    "rules fail": {"ends": 0.05, "slots": 3, "rules": 0.05},
}


@pytest.mark.parametrize("kind", KINDS)
def test_random_requests_answer_as_alone(kind: str) -> None:
    grammars = Grammars(tokenizer(), family("llama").served.vocab_size, ())

    def requests() -> list[Request]:
        draw = Random(kind)
        return [random_request(at, draw, grammars) for at in range(COUNT)]

    expected, pair = alone(requests()), Disturbed(len(kind), **KINDS[kind])
    got = pair.run(requests())
    failed = 0
    for name, one in expected.items():
        last = got[name].last
        assert last is not None
        cut = last.finish in {Finish.CANCELLED, Finish.FAILED}
        assert_same(got[name], one, whole=not cut)
        if cut:
            assert name in pair.ended or last.error == BY_CHANCE
            failed += last.finish is Finish.FAILED
    assert pair.moves > 5
    assert pair.ended
    assert bool(pair.failures) == kind.endswith("fail")
    assert failed or not kind.endswith("fail")
    pair.close()
