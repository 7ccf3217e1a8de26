"""The attempts of one gateway replica. Each ends with one Rejected, one Released or one finish per choice.

Pure bookkeeping: each method handles an event, puts messages for the gateway into the outbox, and returns the
requests on which the engine must act. Uses no streams, threads or clock, and survives a broken stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

from site_engine.core.request import Finish, Output, Request, TokenLogprob
from site_engine.engine_client import Delivered, Prepared, ToolParser
from site_engine.errors import NotServed, Reason
from site_engine.federation.outbox import STREAM_INTERVAL_S, Outbox
from site_engine.messages import (
    Accepted,
    Assign,
    ChatPrompt,
    Delta,
    OnFinish,
    Rejected,
    Release,
    Released,
    ToolChoice,
)

log = logging.getLogger(__name__)


class Phase(Enum):
    PREPARING = "preparing"  # the prompt is being tokenized
    SUBMITTED = "submitted"  # the engine has not replied yet
    ADMITTED = "admitted"


@dataclass(slots=True)
class _Choice:
    request_id: str
    started: bool = False
    ended: bool = False  # in the engine
    finished: bool = False
    parser: ToolParser | None = None
    forced: bool = False  # the client requires a call of the function that it named
    reasoning_tokens: int = 0
    completion_tokens: int = 0  # so far, as the engine counts


@dataclass(slots=True)
class _Attempt:
    assign: Assign
    arrived_s: float
    choices: list[_Choice]
    phase: Phase = Phase.PREPARING
    prompt_tokens: int = 0
    echo: str = ""
    count_offset: int = 0  # delivered tokens beyond those that this engine makes of the delivered text
    cancelled: bool = False

    @property
    def is_unstarted(self) -> bool:
        return not any(each.started or each.finished for each in self.choices)

    @property
    def open_requests(self) -> list[str]:
        return [choice.request_id for choice in self.choices if not choice.finished]


class PendingRelease(NamedTuple):
    """A Release in progress: attempts released already, and attempts that the engine must decide on."""

    release_id: str
    given_up: tuple[str, ...]
    attempt_ids: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


class Route(NamedTuple):
    """The choice of an attempt that receives the outputs of a request."""

    attempts: Attempts
    attempt_id: str
    choice: int


Routes: TypeAlias = dict[str, Route]
"""The routes of all requests at a site, by request id."""


class Attempts:
    """`number` makes request ids unique over the gateway replicas of a site.

    `routes` is shared by all replicas and holds an attempt's requests from `prepared` to its end.
    """

    def __init__(
        self,
        number: int,
        routes: Routes,
        on_finish: OnFinish = lambda *_: None,
        stream_interval_s: float = STREAM_INTERVAL_S,
    ) -> None:
        self.outbox = Outbox(stream_interval_s)
        self.computed: list[bytes] = []  # hashes of computed prompts, to be announced
        self._stream_interval_s = stream_interval_s
        self._number = number
        self._routes = routes
        self._on_finish = on_finish
        self._attempts: dict[str, _Attempt] = {}
        self._preparing: set[str] = set()

    def __contains__(self, attempt_id: str) -> bool:
        return attempt_id in self._attempts

    @property
    def live(self) -> int:
        return len(self._attempts)

    @property
    def preparing(self) -> int:
        return len(self._preparing)

    def is_preparing(self, attempt_id: str) -> bool:
        """Return whether the prompt of an attempt is still needed. May be called on any thread."""
        return attempt_id in self._preparing

    def attempt_ids(self) -> tuple[str, ...]:
        """Return the running attempts, and those whose last deltas have not been sent."""
        return tuple(self._attempts | dict.fromkeys(self.outbox.attempt_ids()))

    def assign(self, assign: Assign, now: float) -> bool:
        """Register an assigned attempt. Return whether to prepare its prompt; a repeated Assign has no
        effect.
        """
        if assign.attempt_id in self._attempts:
            extra = {"request_id": assign.request_id}
            log.warning(
                "attempt %s was assigned twice; the second is ignored", assign.attempt_id, extra=extra
            )
            return False
        request_ids = (f"{self._number}/{index}/{assign.attempt_id}" for index in range(assign.choices))
        self._attempts[assign.attempt_id] = _Attempt(assign, now, [_Choice(each) for each in request_ids])
        self._preparing.add(assign.attempt_id)
        return True

    def prepared(self, attempt_id: str, prepared: Prepared) -> list[Request]:
        """Return the requests to submit, all or none. Empty if the attempt has ended."""
        if attempt_id not in self._preparing:
            return []
        self._preparing.remove(attempt_id)
        attempt = self._attempts[attempt_id]
        attempt.phase = Phase.SUBMITTED
        attempt.prompt_tokens = prepared.tokens
        attempt.echo = prepared.echo
        if attempt.assign.by_text and prepared.resumed:
            attempt.count_offset = attempt.assign.resumed_tokens - len(prepared.resumed)
        set_parsers(attempt, prepared)
        for index, choice in enumerate(attempt.choices):
            self._routes[choice.request_id] = Route(self, attempt_id, index)
        return [engine_request(attempt, prepared, index) for index in range(len(attempt.choices))]

    def wanted(self, attempt_id: str) -> Assign | None:
        """Return the Assign of an attempt, or None if the attempt has ended or was cancelled."""
        attempt = self._attempts.get(attempt_id)
        return None if attempt is None or attempt.cancelled else attempt.assign

    def prepare_again(self, attempt_id: str) -> None:
        """Reset an attempt that the engine has not admitted, so that its prompt is prepared again."""
        attempt = self._attempts[attempt_id]
        attempt.phase, attempt.count_offset = Phase.PREPARING, 0
        for choice in attempt.choices:
            self._routes.pop(choice.request_id, None)
            choice.parser = None
        self._preparing.add(attempt_id)

    def refused(self, attempt_id: str, refusal: NotServed) -> None:
        """End an attempt with a Rejected."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            self._forget(attempt_id)
            self.outbox.put(rejection(attempt.assign, refusal))

    def broken(self, attempt_id: str, error: Exception) -> None:
        """End an attempt whose preparation failed by a fault of the site."""
        log.error("attempt %s cannot be prepared", attempt_id, exc_info=error)
        reason = f"the site cannot prepare this request: {type(error).__name__}"
        self.refused(attempt_id, NotServed(Reason.INTERNAL, reason))

    def admitted(self, attempt_id: str) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            attempt.phase = Phase.ADMITTED
            self.outbox.put(Accepted(attempt_id, attempt.prompt_tokens))

    def deliver(self, attempt_id: str, index: int, output: Output) -> list[str]:
        """Publish an output of a choice. Return the requests to cancel.

        An exception ends only this attempt. Raised further, it would end the link to the engine and all
        answers.
        """
        try:
            self.output(attempt_id, index, output)
        except Exception as exc:
            log.exception("an output of attempt %s cannot be passed on", attempt_id)
            return self._fail(attempt_id, f"the site cannot pass on this answer: {type(exc).__name__}")
        return []

    def _fail(self, attempt_id: str, error: str) -> list[str]:
        """Fail an attempt whose requests still run. Return the requests to cancel."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        self._forget(attempt_id)
        for index, choice in enumerate(attempt.choices):
            if not choice.finished:
                tokens = choice.completion_tokens
                end = Output(
                    choice.request_id, "", finish=Finish.FAILED, error=error, completion_tokens=tokens
                )
                self.outbox.delta(to_delta(attempt_id, index, end, "", attempt.count_offset), urgent=True)
        return [choice.request_id for choice in attempt.choices if not choice.ended]

    def output(self, attempt_id: str, index: int, output: Output) -> None:
        """Publish an output of a choice. Drop it if the attempt or the choice has ended."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.choices[index].finished:
            return
        counted = output.prompt_tokens  # 0: the tokenizer's count holds
        if counted and counted != attempt.prompt_tokens and attempt.phase is Phase.ADMITTED:
            attempt.prompt_tokens = counted  # Accepted had an estimate: send the count before the finish
            self.outbox.put(Accepted(attempt_id, counted))
        choice = attempt.choices[index]
        choice.completion_tokens, choice.ended = output.completion_tokens, output.finish is not None
        begins = not choice.started and begins_answer(output)
        choice.started = choice.started or begins
        if begins and attempt.assign.prefix_hashes:
            self.computed.append(attempt.assign.prefix_hashes)
        if choice.parser is not None:
            output = separate_calls(choice, choice.parser, output)
        self.outbox.delta(
            to_delta(attempt_id, index, output, attempt.echo if begins else "", attempt.count_offset),
            urgent=begins or output.finish is not None,
        )
        if output.finish is not None:
            choice.finished = True
            self._on_finish(attempt.assign, index, output)
            if all(each.finished for each in attempt.choices):
                self._forget(attempt_id)

    def cancel(self, attempt_id: str) -> list[str]:
        """Return the requests to cancel. Their CANCELLED outputs end the attempt.

        An attempt that is unknown has ended already.
        """
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        if attempt.phase is not Phase.PREPARING:
            attempt.cancelled = True
            return attempt.open_requests
        for index in range(len(attempt.choices)):
            self.output(attempt_id, index, Output("", finish=Finish.CANCELLED))
        return []

    def release(self, release: Release) -> PendingRelease:
        """Release the attempts that the engine has not received. The engine decides on the others:
        `released`.
        """
        known = [each for each in release.attempt_ids if each in self and self._attempts[each].is_unstarted]
        given_up = tuple(each for each in known if each in self._preparing)
        for attempt_id in given_up:
            self._forget(attempt_id)
        undecided = tuple(each for each in known if each not in given_up)
        groups = tuple(tuple(self._attempts[each].open_requests) for each in undecided)
        return PendingRelease(release.release_id, given_up, undecided, groups)

    def released(self, pending: PendingRelease, decisions: Sequence[bool]) -> None:
        """`decisions`: for each of `pending.attempt_ids`, whether the engine released it."""
        given_up = [each for each, gone in zip(pending.attempt_ids, decisions, strict=True) if gone]
        for attempt_id in given_up:
            self._forget(attempt_id)
        self.outbox.put(Released(pending.release_id, (*pending.given_up, *given_up)))

    def abandon(self) -> list[str]:
        """Drop all attempts. Return the requests to cancel, whose outputs are no longer routed."""
        submitted = [each for each in self._attempts.values() if each.phase is not Phase.PREPARING]
        request_ids = [request_id for attempt in submitted for request_id in attempt.open_requests]
        for attempt_id in list(self._attempts):
            self._forget(attempt_id)
        self.outbox = Outbox(self._stream_interval_s)
        return request_ids

    def _forget(self, attempt_id: str) -> None:
        self._preparing.discard(attempt_id)
        attempt = self._attempts.pop(attempt_id, None)
        for choice in attempt.choices if attempt is not None else ():
            self._routes.pop(choice.request_id, None)


def rejection(assign: Assign, refusal: NotServed) -> Rejected:
    """Return the message for a refusal. The client of a chat knows the engine's `prompt` as `messages`."""
    is_chat = isinstance(assign.prompt, ChatPrompt)
    param = "messages" if is_chat and refusal.param == "prompt" else refusal.param
    return Rejected(assign.attempt_id, refusal.reason, refusal.message, param)


def engine_request(attempt: _Attempt, prepared: Prepared, index: int) -> Request:
    assign = attempt.assign
    return Request(
        id=attempt.choices[index].request_id,
        prompt=prepared.token_ids,
        sampling=assign.sampling.after(attempt.count_offset),
        remaining=assign.remaining,
        lane=assign.lane,
        any_order=assign.any_order,
        prefill_heavy=assign.prefill_heavy,
        priority=assign.priority,
        tenant=assign.tenant,
        deadline_s=None if assign.deadline_s is None else attempt.arrived_s + assign.deadline_s,
        choice=index,
        resumed=prepared.resumed,
        resumed_chars=0 if prepared.tool_calling else assign.resumed_chars,  # the parser needs the whole text
        grammar=prepared.grammar,
        shown=prepared.shown,
        thinking=prepared.thinking,
        resumed_reasoning_chars=assign.resumed_reasoning_chars or 0,
        follows=not isinstance(assign.prompt, ChatPrompt) and not assign.by_text,
        chain=prepared.chain,
    )


def set_parsers(attempt: _Attempt, prepared: Prepared) -> None:
    if prepared.tool_calling is None:
        return
    assign, tools = attempt.assign, attempt.assign.tools
    delivered = Delivered(
        assign.resumed_chars,
        assign.resumed_calls,
        assign.resumed_argument_chars,
        assign.resumed_reasoning_chars or 0,
    )
    for index, choice in enumerate(attempt.choices):
        choice.parser = prepared.tool_calling.parser(f"{assign.attempt_id}/{index}", delivered)
        choice.forced = tools is not None and tools.choice is ToolChoice.NAMED


def separate_calls(choice: _Choice, parser: ToolParser, output: Output) -> Output:
    """Separate tool calls from text. A stop after a call becomes TOOL_CALLS, unless the call was forced."""
    text, calls, reasoning = parser.feed(output.text)
    if output.finish in {Finish.STOP, Finish.LENGTH}:
        rest = parser.end()
        text, calls, reasoning = text + rest.text, calls + rest.calls, reasoning + rest.reasoning
    if reasoning:
        choice.reasoning_tokens = output.completion_tokens  # answers begin with their reasoning
    stopped_for_call = output.finish is Finish.STOP and parser.calls and not choice.forced
    return output._replace(
        text=text,
        tool_calls=calls,
        reasoning=output.reasoning + reasoning,
        reasoning_tokens=max(output.reasoning_tokens, choice.reasoning_tokens),
        finish=Finish.TOOL_CALLS if stopped_for_call else output.finish,
    )


def begins_answer(output: Output) -> bool:
    """Return whether an output begins its answer; an answer without tokens begins with its finish."""
    content = output.token_ids or output.text or output.tool_calls or output.reasoning or output.refusal
    return bool(content) or output.finish not in {None, Finish.CANCELLED, Finish.FAILED}


def to_delta(attempt_id: str, index: int, output: Output, echo: str, count_offset: int) -> Delta:
    return Delta(
        attempt_id=attempt_id,
        choice=index,
        text=echo + output.text,
        token_ids=output.token_ids,
        completion_tokens=max(0, output.completion_tokens + count_offset),
        finish=output.finish,
        error=output.error,
        logprobs=output.logprobs,
        prompt_logprobs=text_of_prompt(output.prompt_logprobs, echo) if echo else output.prompt_logprobs,
        timings=None if output.finish is None else output.timings,
        tool_calls=output.tool_calls,
        reasoning=output.reasoning,
        refusal=output.refusal,
        reasoning_tokens=output.reasoning_tokens,
        stop_sequence=output.stop_sequence,
        pooled=output.pooled,
    )


def text_of_prompt(tokens: Sequence[TokenLogprob], echo: str) -> tuple[TokenLogprob, ...]:
    """Trim the first tokens to the bytes that they have in the echoed text, which is a suffix of all tokens'
    bytes: a BOS token added by the tokenizer and a space before the first word are not part of it.
    """
    raw, text = b"".join(token.raw for token in tokens), echo.encode()
    extra, placed = len(raw) - len(text) if raw.endswith(text) else 0, list[TokenLogprob]()
    for token in tokens:
        cut = min(extra, len(token.raw))
        extra -= cut
        placed.append(replace(token, raw=token.raw[cut:]) if cut else token)
    return tuple(placed)
