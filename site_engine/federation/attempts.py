"""The attempts of one gateway replica: each ends in one Rejected, one Released or one finish per choice.

Pure bookkeeping: each method takes what happened, notes what the gateway is owed in the outbox, and returns
what is to be asked of the engine. Does not know streams, threads or the clock; outlives a stream that broke.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from site_engine.core.request import Admission, Finish, Output, Request
from site_engine.errors import NotServed
from site_engine.federation.outbox import Outbox
from site_engine.messages import Accepted, Assign, ChatPrompt, Delta, Rejected, Release, Released
from site_engine.text.tokenize import Prepared
from site_engine.text.tool_call_parser import CallReader, Delivered
from site_engine.text.tool_format import ToolChoice

log = logging.getLogger(__name__)


class Phase(Enum):
    PREPARING = "preparing"  # its prompt is being tokenized
    SUBMITTED = "submitted"  # the engine has been asked and has not answered
    ADMITTED = "admitted"


@dataclass(slots=True)
class _Choice:
    started: bool = False
    finished: bool = False
    reader: CallReader | None = None
    forced: bool = False  # to call the one function that the client named


@dataclass(slots=True)
class _Attempt:
    assign: Assign
    arrived_s: float
    phase: Phase = Phase.PREPARING
    prompt_tokens: int = 0
    admission: Admission | None = None
    echo: str = ""
    uncounted: int = 0  # delivered tokens beyond those that this engine makes of the delivered text
    choices: list[_Choice] = field(default_factory=list)


class Asked(NamedTuple):
    """A Release under way: the attempts given up already, and those that the engine is to give up."""

    release_id: str
    given_up: tuple[str, ...]
    attempt_ids: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


Tell = Callable[[Assign, int, Output], None]
"""Told of the last output of each choice of an attempt."""


class Desk:
    """`number` makes request ids unique over the desks of a site."""

    def __init__(self, number: int, tell: Tell = lambda *_: None) -> None:
        self.number = number
        self._tell = tell
        self.outbox = Outbox()
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

    def attempt_ids(self) -> tuple[str, ...]:
        """Those that run, and those whose last words have not been sent."""
        return tuple(self._attempts | dict.fromkeys(self.outbox.attempt_ids()))

    def assign(self, assign: Assign, now: float) -> bool:
        """Whether the prompt is to be prepared: a repeated Assign changes nothing."""
        if assign.attempt_id in self._attempts:
            told = {"request_id": assign.request_id}
            log.warning("attempt %s was assigned twice; the second is ignored", assign.attempt_id, extra=told)
            return False
        choices = [_Choice() for _ in range(assign.choices)]
        self._attempts[assign.attempt_id] = _Attempt(assign, now, choices=choices)
        self._preparing.add(assign.attempt_id)
        return True

    def prepared(self, attempt_id: str, prepared: Prepared) -> list[Request]:
        """The requests to submit, all or none; empty if the attempt is gone."""
        if attempt_id not in self._preparing:
            return []
        self._preparing.remove(attempt_id)
        attempt = self._attempts[attempt_id]
        attempt.phase = Phase.SUBMITTED
        attempt.prompt_tokens = prepared.tokens
        attempt.echo = prepared.echo
        if attempt.assign.by_text and prepared.resumed:
            attempt.uncounted = attempt.assign.resumed_tokens - len(prepared.resumed)
        _give_readers(attempt, prepared)
        return [self._request(attempt, prepared, index) for index in range(len(attempt.choices))]

    def refused(self, attempt_id: str, refusal: NotServed) -> None:
        """What the engine calls the prompt, the client of a chat knows as its messages."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            is_chat = isinstance(attempt.assign.prompt, ChatPrompt)
            param = "messages" if is_chat and refusal.param == "prompt" else refusal.param
            self._forget(attempt_id)
            self.outbox.put(Rejected(attempt_id, refusal.reason, refusal.message, param))

    def admitted(self, attempt_id: str, admission: Admission) -> None:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            attempt.phase = Phase.ADMITTED
            attempt.admission = admission
            self.outbox.put(Accepted(attempt_id, attempt.prompt_tokens, *admission))

    def output(self, attempt_id: str, index: int, output: Output) -> None:
        """Notes what a choice produced; output of an attempt that is gone, or past its finish, is dropped."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.choices[index].finished:
            return
        if output.prompt_tokens:
            self._counted(attempt, output.prompt_tokens)
        choice = attempt.choices[index]
        begins = not choice.started and _speaks(output)
        choice.started = choice.started or begins
        if choice.reader is not None:
            output = _read(choice, choice.reader, output)
        self.outbox.delta(
            _delta(attempt_id, index, output, attempt.echo if begins else "", attempt.uncounted),
            urgent=begins or output.finish is not None,
        )
        if output.finish is not None:
            choice.finished = True
            self._tell(attempt.assign, index, output)
            if all(each.finished for each in attempt.choices):
                self._forget(attempt_id)

    def cancel(self, attempt_id: str) -> list[str]:
        """The requests to cancel; their CANCELLED outputs end the attempt. An unknown one has ended."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return []
        if attempt.phase is not Phase.PREPARING:
            return self._request_ids(attempt)
        for index in range(len(attempt.choices)):
            self.output(attempt_id, index, Output("", finish=Finish.CANCELLED))
        return []

    def release(self, release: Release) -> Asked:
        """Gives up what the engine has not seen; about the rest the engine answers, to `released`."""
        known = [each for each in release.attempt_ids if self._untouched(each)]
        given_up = tuple(each for each in known if each in self._preparing)
        for attempt_id in given_up:
            self._forget(attempt_id)
        asked = tuple(each for each in known if each not in given_up)
        groups = tuple(tuple(self._request_ids(self._attempts[each])) for each in asked)
        return Asked(release.release_id, given_up, asked, groups)

    def released(self, asked: Asked, gone: Sequence[bool]) -> None:
        """`gone` says for each of `asked.attempt_ids` whether the engine gave it up."""
        given_up = [each for each, is_gone in zip(asked.attempt_ids, gone, strict=True) if is_gone]
        for attempt_id in given_up:
            self._forget(attempt_id)
        self.outbox.put(Released(asked.release_id, (*asked.given_up, *given_up)))

    def abandon(self) -> list[str]:
        """Nobody waits for anything any more: the requests to cancel, whose output will be dropped."""
        waiting = [attempt for attempt in self._attempts.values() if attempt.phase is not Phase.PREPARING]
        request_ids = [request_id for attempt in waiting for request_id in self._request_ids(attempt)]
        self._attempts.clear()
        self._preparing.clear()
        self.outbox = Outbox()
        return request_ids

    def _untouched(self, attempt_id: str) -> bool:
        attempt = self._attempts.get(attempt_id)
        return attempt is not None and not any(each.started or each.finished for each in attempt.choices)

    def _counted(self, attempt: _Attempt, prompt_tokens: int) -> None:
        """Accepted with a guess of the prompt's tokens: said again with their number, before the finish."""
        if attempt.admission is not None and prompt_tokens != attempt.prompt_tokens:
            attempt.prompt_tokens = prompt_tokens
            self.outbox.put(Accepted(attempt.assign.attempt_id, prompt_tokens, *attempt.admission))

    def _forget(self, attempt_id: str) -> None:
        self._attempts.pop(attempt_id, None)
        self._preparing.discard(attempt_id)

    def _request_ids(self, attempt: _Attempt) -> list[str]:
        return [
            request_id(self.number, attempt.assign.attempt_id, index)
            for index, choice in enumerate(attempt.choices)
            if not choice.finished
        ]

    def _request(self, attempt: _Attempt, prepared: Prepared, index: int) -> Request:
        assign = attempt.assign
        return Request(
            id=request_id(self.number, assign.attempt_id, index),
            prompt=prepared.token_ids,
            sampling=assign.sampling.after(attempt.uncounted),
            remaining=assign.remaining,
            lane=assign.lane,
            priority=assign.priority,
            tenant=assign.tenant,
            deadline_s=None if assign.deadline_s is None else attempt.arrived_s + assign.deadline_s,
            choice=index,
            resumed=prepared.resumed,
            resumed_chars=0 if prepared.calling else assign.resumed_chars,  # the reader sees all of it
            grammar=prepared.grammar,
            shown=prepared.calling.shown if prepared.calling else {},
            follows=not isinstance(assign.prompt, ChatPrompt) and not assign.by_text,
        )


def _give_readers(attempt: _Attempt, prepared: Prepared) -> None:
    if prepared.calling is None:
        return
    assign, tools = attempt.assign, prepared.calling.tools
    delivered = Delivered(assign.resumed_chars, assign.resumed_calls, assign.resumed_argument_chars)
    for index, choice in enumerate(attempt.choices):
        choice.reader = prepared.calling.reader(f"{assign.attempt_id}/{index}", delivered)
        choice.forced = tools.choice is ToolChoice.NAMED


def _read(choice: _Choice, reader: CallReader, output: Output) -> Output:
    """The output with calls told from text. An engine that stops by itself after a call stopped for it."""
    text, calls = reader.feed(output.text)
    if output.finish in {Finish.STOP, Finish.LENGTH}:
        rest = reader.end()
        text, calls = text + rest.text, calls + rest.calls
    stops_for_it = output.finish is Finish.STOP and reader.calls and not choice.forced
    return output._replace(
        text=text,
        tool_calls=calls,
        finish=Finish.TOOL_CALLS if stops_for_it else output.finish,
    )


def request_id(desk: int, attempt_id: str, index: int) -> str:
    return f"{desk}/{index}/{attempt_id}"


class Address(NamedTuple):
    """Where an engine's output belongs."""

    desk: int
    choice: int
    attempt_id: str


def address(of_request: str) -> Address:
    desk, choice, attempt_id = of_request.split("/", 2)
    return Address(int(desk), int(choice), attempt_id)


def _speaks(output: Output) -> bool:
    """Whether an answer begins here; one of no tokens at all begins with its finish."""
    said = output.token_ids or output.text or output.tool_calls
    return bool(said) or output.finish in {Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS}


def _delta(attempt_id: str, index: int, output: Output, echo: str, uncounted: int) -> Delta:
    return Delta(
        attempt_id=attempt_id,
        index=index,
        text=echo + output.text,
        token_ids=output.token_ids,
        completion_tokens=max(0, output.completion_tokens + uncounted),
        finish=output.finish,
        error=output.error,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        timings=output.timings,
        tool_calls=output.tool_calls,
    )
