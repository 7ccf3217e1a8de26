"""Pack requests, admissions and outputs into the messages of `process_messages.py`, and unpack them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from site_engine.core.request import Moved, Output, Request, TokenLogprob
from site_engine.core.step_outputs import StepOutputs, with_more_than_a_token
from site_engine.engine import process_messages as pm
from site_engine.engine_client import Group
from site_engine.errors import NotServed, Reason


def to_submit(
    call: int,
    numbers: list[int],
    group: Group,
    generated: Sequence[int] = (),
    moved: Moved | None = None,
) -> pm.Submit:
    """Pack the requests of a group, or a single request that another engine has begun.

    `generated`: its output tokens beyond the resumed ones. Prompt log probabilities came with the first.
    """
    first = group[0]
    sampling = first.sampling
    if generated and sampling.prompt_logprobs:
        sampling = replace(sampling, prompt_logprobs=False)
    return pm.Submit(
        call,
        numbers,
        [each.id for each in group],
        [each.choice for each in group],
        array("i", first.prompt).tobytes(),
        array("i", (*first.resumed, *generated)).tobytes(),
        sampling,
        first.remaining,
        first.lane,
        first.priority,
        first.tenant,
        first.deadline_s,
        "" if first.grammar is None else first.grammar.source,
        first.chain,
        first.any_order,
        first.prefill_heavy,
        moved,
    )


def to_requests(submit: pm.Submit) -> list[Request]:
    """Return the requests of a Submit without their grammar."""
    prompt, resumed = array("i", submit.prompt), array("i", submit.resumed)
    return [
        Request(
            request_id,
            prompt,
            submit.sampling,
            submit.remaining,
            submit.lane,
            submit.priority,
            submit.tenant,
            submit.deadline_s,
            choice,
            resumed,
            chain=submit.chain,
            any_order=submit.any_order,
            prefill_heavy=submit.prefill_heavy,
        )
        for request_id, choice in zip(submit.ids, submit.choices, strict=True)
    ]


def to_admitted(call: int, answer: NotServed | None) -> pm.Admitted:
    if answer is None:
        return pm.Admitted(call)
    return pm.Admitted(call, answer.reason.value, answer.message, answer.param)


def from_admitted(message: pm.Admitted) -> NotServed | None:
    if not message.reason:
        return None
    return NotServed(Reason(message.reason), message.message, message.param)


def to_step(outputs: Sequence[Output], numbers: Mapping[str, int]) -> pm.Step:
    """Pack outputs. `numbers` maps request ids to numbers; log probabilities name tokens by id."""
    request_ids, token_ids, others = list[str](), list[int](), with_more_than_a_token(outputs)
    if isinstance(outputs, StepOutputs):
        request_ids, token_ids = outputs.request_ids, outputs.token_ids
    token_ids = token_ids + [each.token_ids[0] if each.token_ids else 0 for each in others]
    details = [
        pm.Detail(
            row,
            bool(output.token_ids),
            output.finish,
            output.error,
            output.timings,
            [_ranked(each) for each in output.logprobs],
            [_ranked(each) for each in output.prompt_logprobs],
        )
        for row, output in enumerate(others, start=len(request_ids))
        if output.timings is not None or output.finish is not None or output.logprobs
    ]
    request_ids = request_ids + [each.request_id for each in others]
    return pm.Step([numbers[each] for each in request_ids], token_ids, details)


def _ranked(value: TokenLogprob) -> pm.RankedToken:
    top = [(int(each.token), each.logprob) for each in value.top]
    return pm.RankedToken(int(value.token), value.logprob, top)
