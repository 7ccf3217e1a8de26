"""Places for the keys and values of requests that move, in the inboxes of the engines to which they go."""

from __future__ import annotations

from site_engine.core.inbox import PLACES, InboxAddress, InboxPlace


class Places:
    """A place is one request's from the beginning of its move until its engine has taken it, or it stays."""

    def __init__(self) -> None:
        self._given: dict[str, InboxPlace] = {}  # by request
        self._turn = 0

    def give(self, request_id: str, inbox: InboxAddress | None) -> InboxPlace | None:
        """Give a request a place in an inbox; None if it is full, or there is none.

        By turns: what a lost engine has begun to copy may go on for a moment.
        """
        taken = {each.number for each in self._given.values() if each.inbox == inbox}
        self._turn += 1
        free = [at % PLACES for at in range(self._turn, self._turn + PLACES) if at % PLACES not in taken]
        if inbox is None or not free:
            return None
        self._given[request_id] = InboxPlace(inbox, free[0])
        return self._given[request_id]

    @property
    def are_free(self) -> bool:
        """Return whether no request has any."""
        return not self._given

    def free(self, *request_ids: str) -> None:
        """Take back the places of requests that need none any more."""
        for each in request_ids:
            self._given.pop(each, None)
