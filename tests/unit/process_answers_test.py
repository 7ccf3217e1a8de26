"""The answers of an engine's process: tokens wait to be read together, nothing else does."""

from __future__ import annotations

from site_engine.core.request import Finish, Output, Request, Sampling, Timings
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_answers import Answers
from site_engine.engine.process_messages import Detail, Step
from tests.support.fake_engine_process import LETTERS

BEGUN = Timings(0.0, 0.0, 0.0, 0, 0)


def answers(*stops: str) -> tuple[Answers, list[tuple[int, int]]]:
    """Return three answers with the numbers 1 to 3, and the list of those that their text ends."""
    ended: list[tuple[int, int]] = []
    found = Answers(lambda number, generated: ended.append((number, generated)))
    for number in (1, 2, 3):
        request = Request(f"r{number}", (1,), Sampling(max_tokens=100, stop=stops))
        found.add(number, Answer(request, LETTERS, ()))
    return found, ended


def step(*rows: tuple[int, str], first: int | None = None, last: int | None = None) -> Step:
    """`first` and `last` are rows that begin or end an answer."""
    begun = [] if first is None else [Detail(first, True, None, "", BEGUN, [], [])]
    ended = [] if last is None else [Detail(last, True, Finish.LENGTH, "", BEGUN, [], [])]
    return Step([number for number, _ in rows], [ord(text) for _, text in rows], begun + ended)


def texts(outputs: list[Output]) -> list[tuple[str, str]]:
    return [(each.request_id, each.text) for each in outputs]


def test_tokens_of_several_iterations_are_read_as_one_output() -> None:
    here, _ = answers()
    assert texts(here.take(step((1, "a"), (2, "x"), first=0), 0.0)) == [("r1", "a")]
    assert here.has_unread
    assert here.take(step((2, "y"), (1, "b")), 0.0) == []
    assert here.take(step((1, "c"), (2, "z")), 0.0) == []
    read = here.read(0.0)
    assert texts(read) == [("r2", "xyz"), ("r1", "bc")]
    assert [each.completion_tokens for each in read] == [3, 3]
    assert not here.has_unread
    assert here.read(0.0) == []


def test_the_end_of_an_answer_waits_for_nothing_and_comes_last() -> None:
    here, _ = answers()
    here.take(step((1, "a"), (2, "x")), 0.0)
    ended = here.take(step((1, "b"), (2, "y"), last=0), 0.0)
    assert texts(ended) == [("r1", "a"), ("r1", "b")]
    assert [each.finish for each in ended] == [None, Finish.LENGTH]
    assert here.number_of("r1") is None
    assert texts(here.read(0.0)) == [("r2", "xy")]


def test_what_follows_a_stop_string_is_not_read_and_the_engine_is_told_once() -> None:
    here, ended = answers("!")
    for text in "ab!cd":
        here.take(step((3, text)), 0.0)
    assert ended == []
    (read,) = here.read(0.0)
    assert (read.text, read.finish, read.token_ids, read.completion_tokens) == (
        "ab",
        Finish.STOP,
        (97, 98, 33),
        3,
    )
    assert ended == [(3, 3)]
    here.take(step((3, "e")), 0.0)
    assert here.read(0.0) == []
    assert here.take(step((3, "f"), last=0), 0.0) == []
    assert here.get(3) is None
    assert ended == [(3, 3)]


def test_of_an_answer_that_is_gone_nothing_is_read() -> None:
    here, _ = answers()
    here.take(step((1, "a"), (2, "x")), 0.0)
    assert [each.request.id for each in here.pop([1])] == ["r1"]
    here.take(step((1, "b")), 0.0)
    assert texts(here.read(0.0)) == [("r2", "x")]
    assert [each.request.id for each in here.pop_all()] == ["r2", "r3"]


def test_what_was_cached_goes_on_with_an_answer_whose_engine_is_lost() -> None:
    here, _ = answers()
    here.take(Step([1], [ord("a")], [Detail(0, True, None, "", Timings(0.0, 0.0, 0.0, 7, 0), [], [])]), 0.0)
    (answer, *_) = here
    assert answer.to_move().cached_tokens == 7
