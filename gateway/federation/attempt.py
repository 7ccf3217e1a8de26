"""One live try of one query on one site: what has come of it, for the one reader that relays it.

Does not talk to the site; `link.py` feeds it and is told when the reader gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from gateway.domain import Broken, Decision, Delta, Finish, SiteIdentity
from gateway.routing.demand import Demand


class AttemptBroken(Exception):
    """Raised to the reader when the attempt cannot go on at its site."""

    def __init__(self, broken: Broken) -> None:
        super().__init__(broken.message)
        self.broken = broken


class Accepted(NamedTuple):
    prompt_tokens: int
    position: int
    max_tokens: int


@dataclass(slots=True)
class _Choice:
    pending: Delta | None = None
    completion_tokens: int = 0
    finished: bool = False


class LiveAttempt:
    """Deltas of a choice that the reader has not fetched yet are merged: memory is bounded by one answer.

    One reader awaits `next`; `ended` is set once every choice has finished or the attempt broke.
    """

    def __init__(
        self,
        *,
        decision: Decision,
        demand: Demand,
        site: SiteIdentity,
        choices: int,
        moves: int,
        on_cancel: Callable[[LiveAttempt], None],
        resumable: bool = True,
    ) -> None:
        self.decision = decision
        self.demand = demand
        self.site = site
        self.moves = moves
        self.resumable = resumable
        self.started = False
        self.accepted: Accepted | None = None
        self.late = False
        self.broken: Broken | None = None
        self.ended = asyncio.Event()
        self._choices = [_Choice() for _ in range(choices)]
        self._reader: asyncio.Future[None] | None = None
        self._on_cancel = on_cancel

    @property
    def id(self) -> str:
        return self.decision.attempt_id

    @property
    def movable(self) -> bool:
        """Whether another site can take it over without the client noticing."""
        return self.resumable or not self.started

    @property
    def completion_tokens(self) -> int:
        """Counted by the site, over all choices."""
        if len(self._choices) == 1:
            return self._choices[0].completion_tokens
        return sum(choice.completion_tokens for choice in self._choices)

    # -- the link's side --

    def accept(self, accepted: Accepted) -> None:
        self.accepted = accepted

    def feed(self, delta: Delta) -> None:
        """Take one delta. Raises IndexError for a choice that was not asked for."""
        choice = self._choices[delta.index]
        if choice.finished or self.ended.is_set():
            return
        self.started = True
        choice.pending = delta if choice.pending is None else _merge(choice.pending, delta)
        choice.completion_tokens = max(choice.completion_tokens, delta.completion_tokens)
        if delta.finish is not None:
            choice.finished = True
            if all(c.finished for c in self._choices):
                self.ended.set()
        self._wake()

    def count(self, index: int, completion_tokens: int) -> None:
        choice = self._choices[index]
        choice.completion_tokens = max(choice.completion_tokens, completion_tokens)

    def close_choice(self, index: int, broken: Broken) -> None:
        """A choice was cancelled at the site; the attempt has ended once all its choices have."""
        self._choices[index].finished = True
        if all(choice.finished for choice in self._choices):
            self.fail(broken)

    def fail(self, broken: Broken) -> None:
        if not self.ended.is_set():
            self.broken = broken
            self.ended.set()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- the reader's side --

    async def next(self) -> list[Delta]:
        """What came since the last call, one delta a choice, in order of choices; [] after the end.

        Raises AttemptBroken after everything that came before the break has been handed out, and TimeoutError
        once it was hurried and there is nothing to hand out.
        """
        while True:
            if news := self._take():
                return news
            if self.broken is not None:
                raise AttemptBroken(self.broken)
            if self.ended.is_set():
                return []
            if self.late:
                raise TimeoutError
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def hurry(self) -> None:
        """The reader waits for no more than has come by now."""
        self.late = True
        self._wake()

    def cut(self) -> list[Delta]:
        """What ends the choices that run on, as if they had reached their length."""
        news, open_choices = {}, [n for n, choice in enumerate(self._choices) if not choice.finished]
        for delta in self._take():
            news[delta.index] = delta
        for index in open_choices:
            last = news.get(index) or Delta(index, "", self._choices[index].completion_tokens)
            news[index] = replace(last, finish=Finish.LENGTH)
        return list(news.values())

    def cancel(self) -> None:
        """The reader wants no more of it. A no-op after the end; the site's last count still arrives."""
        if not self.ended.is_set():
            self._on_cancel(self)

    def _take(self) -> list[Delta]:
        news = []
        for choice in self._choices:
            if choice.pending is not None:
                news.append(choice.pending)
                choice.pending = None
        return news


def _merge(first: Delta, then: Delta) -> Delta:
    return replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        prompt_logprobs=first.prompt_logprobs + then.prompt_logprobs,
        tool_calls=first.tool_calls + then.tool_calls,
    )
