"""Whatever crosses between a site's process and its engine's arrives as it was, however the bytes are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Output, Request, Sampling, Timings, TokenLogprob
from site_engine.engine import process_messages as pm
from site_engine.engine import process_packing as packing
from site_engine.errors import NotServed, Reason
from tests.support.site_fakes import FakeEngine

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20)
numbers = st.floats(allow_nan=False)
samplings = st.builds(
    Sampling,
    max_tokens=st.none() | st.integers(0, 10**6),
    temperature=numbers,
    top_k=st.integers(0, 2**31),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    stop_token_ids=tokens.map(tuple),
    ignore_eos=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, 2**31), numbers, max_size=4),
    logprobs=st.none() | st.integers(0, 20),
    left_out=st.frozensets(st.sampled_from(["top_p", "temperature"])),
)


@given(tokens, tokens, samplings, st.integers(1, 5), st.none() | numbers)
def test_a_group_arrives_as_it_was(
    prompt: list[int], resumed: list[int], sampling: Sampling, choices: int, deadline_s: float | None
) -> None:
    group = [
        Request(
            f"r/{choice}",
            prompt,
            sampling,
            RemainingCurve.exactly(9),
            Lane.BATCH,
            -3,
            "shop",
            deadline_s,
            choice,
            resumed,
        )
        for choice in range(choices)
    ]
    sent = packing.to_submit(7, list(range(choices)), group)
    got = pm.decode_to_engine(pm.frame(sent)[4:])
    assert got == sent
    assert isinstance(got, pm.Submit)
    for before, after in zip(group, packing.to_requests(got), strict=True):
        assert after.tokens == before.tokens
        assert list(after.resumed) == resumed
        for name in ("id", "sampling", "remaining", "lane", "priority", "tenant", "deadline_s", "choice"):
            assert getattr(after, name) == getattr(before, name)
        assert type(after.sampling.stop) is tuple
        assert after.lane is Lane.BATCH


named = st.builds(
    TokenLogprob, st.integers(0, 2**31).map(str), st.just(b""), st.none() | numbers, st.just(())
)
ranked = st.builds(
    TokenLogprob,
    st.integers(0, 2**31).map(str),
    st.just(b""),
    numbers,
    st.lists(named, max_size=3).map(tuple),
)
timings = st.builds(Timings, numbers, numbers, numbers, st.integers(0, 9), st.integers(0, 9))
rows = st.builds(
    Output,
    request_id=st.just("r"),
    token_ids=st.integers(0, 2**31).map(lambda each: (each,)) | st.just(()),
    finish=st.none() | st.sampled_from(Finish),
    error=st.text(max_size=5),
    logprobs=st.lists(ranked, max_size=2).map(tuple),
    prompt_logprobs=st.lists(named, max_size=2).map(tuple),
    timings=st.none() | timings,
).filter(lambda each: each.token_ids or each.finish)


@given(st.lists(rows, max_size=30))
def test_the_rows_of_a_step_arrive_as_they_were(outputs: list[Output]) -> None:
    outputs = [output._replace(request_id=f"row {row}") for row, output in enumerate(outputs)]
    sent = packing.to_step(outputs, {f"row {row}": 100 + row for row in range(len(outputs))})
    got = pm.decode_from_engine(pm.frame(sent)[4:])
    assert got == sent
    assert isinstance(got, pm.Step)
    details = {each.row: each for each in got.details}
    assert got.numbers == list(range(100, 100 + len(outputs)))
    for row, output in enumerate(outputs):
        detail = details.get(row)
        if detail is None:
            assert (got.token_ids[row],) == output.token_ids
            assert output.finish is output.timings is None
            assert output.logprobs == ()
            continue
        assert ((got.token_ids[row],) if detail.has_token else ()) == output.token_ids
        assert (detail.finish, detail.error, detail.timings) == (output.finish, output.error, output.timings)
        assert [(str(each.token_id), each.logprob) for each in detail.logprobs] == [
            (each.token, each.logprob) for each in output.logprobs
        ]
        assert [[str(top[0]) for top in each.top] for each in detail.logprobs] == [
            [top.token for top in each.top] for each in output.logprobs
        ]
        assert [str(each.token_id) for each in detail.prompt_logprobs] == [
            each.token for each in output.prompt_logprobs
        ]


@given(st.lists(st.integers(0, 40)), st.data())
def test_messages_are_found_however_the_bytes_are_cut(groups: list[int], data: st.DataObject) -> None:
    sent = [pm.Cancel(list(range(count))) for count in groups]
    stream = b"".join(pm.frame(each) for each in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=9)))
    frames = pm.Frames()
    got = [
        pm.decode_to_engine(body)
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for body in frames.feed(stream[start:end])
    ]
    assert got == sent


def test_figures_and_answers_arrive_as_they_were() -> None:
    load = pm.Load(FakeEngine().load()._replace(running_remaining=(1, 5)), 12.5)
    assert pm.decode_from_engine(pm.frame(load)[4:]) == load
    for answer in (None, NotServed(Reason.CONTEXT_LENGTH, "too long", "prompt")):
        got = pm.decode_from_engine(pm.frame(packing.to_admitted(1, answer))[4:])
        assert isinstance(got, pm.Admitted)
        back = packing.from_admitted(got)
        if isinstance(answer, NotServed):
            assert isinstance(back, NotServed)
            assert (back.reason, back.message, back.param) == (answer.reason, answer.message, answer.param)
        else:
            assert back == answer
