"""An engine in a process of its own answers as one in the site's process does."""

from __future__ import annotations

import asyncio

import pytest

from site_engine.core.request import Finish
from tests.support.engine_split import compare, differences, random_cases

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_answers_are_the_same_in_a_process_of_its_own(name: str) -> None:
    cases = random_cases(40, seed=len(name))
    compared = asyncio.run(compare(name, cases))
    assert differences(cases, compared.here, compared.there) == []
    results = [result for choices in compared.there for result in choices]
    finishes = {result.finish for result in results}
    assert finishes >= {Finish.STOP, Finish.LENGTH, Finish.CANCELLED}
    assert any(result.stop_sequence for result in results)
    assert all(result.has_timings for result in results if result.finish is Finish.STOP)
    assert any(result.preemptions for result in results)
