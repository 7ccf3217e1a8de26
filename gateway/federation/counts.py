"""Requests to one site to count the tokens of prompts. Synchronous except for the wait of each caller."""

from __future__ import annotations

import asyncio

from gateway.domain import Query
from gateway.failure import AttemptFailure, FailureCause
from gateway.federation import codec
from gateway.federation.attempt import AttemptFailed
from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb


class Counts:
    """The counts in progress over one link. `close`, for a lost link, fails these and all later ones."""

    def __init__(self, site: str, outbox: Outbox) -> None:
        self._site = site
        self._outbox = outbox
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._lost: AttemptFailure | None = None

    async def count(self, query: Query, count_id: str, within_s: float) -> int:
        """Return the number of prompt tokens. Raises AttemptFailed, with cause LOST after `within_s`."""
        if self._lost is not None:
            raise AttemptFailed(self._lost)
        if self._outbox.full:
            raise AttemptFailed(
                AttemptFailure(self._site, FailureCause.FULL, f"{self._site} reads too slowly")
            )
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[count_id] = answer
        self._outbox.put(codec.count(query, count_id), count_id)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError as exc:
            message = f"{self._site} did not count the prompt within {within_s:.0f} s"
            raise AttemptFailed(AttemptFailure(self._site, FailureCause.LOST, message)) from exc
        finally:
            del self._waiting[count_id]
            if answer.cancelled() and not self._outbox.withdraw(count_id):
                self._outbox.put(pb.GatewayMessage(cancel=pb.Cancel(attempt_id=count_id)))

    def counted(self, message: pb.Counted) -> None:
        answer = self._waiting.get(message.attempt_id)
        if answer is not None and not answer.done():
            answer.set_result(message.prompt_tokens)

    def rejected(self, message: pb.Rejected) -> None:
        """Fail the count of this id, if there is one."""
        self._fail(message.attempt_id, codec.rejected(message, self._site))

    def close(self, failure: AttemptFailure) -> None:
        self._lost = failure
        for count_id in self._waiting:
            self._fail(count_id, failure)

    def _fail(self, count_id: str, failure: AttemptFailure) -> None:
        answer = self._waiting.get(count_id)
        if answer is not None and not answer.done():
            answer.set_exception(AttemptFailed(failure))
