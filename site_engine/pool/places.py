"""Places for the keys and values of requests that move, in the inboxes of the engines to which they go."""

from __future__ import annotations

from site_engine.core.inbox import PLACES, InboxAddress, InboxPlace


class Places:
    """Assigns a place to each request that moves, until its new engine has it or the move is given up."""

    def __init__(self) -> None:
        self._given: dict[str, InboxPlace] = {}  # by request
        self._turn = 0

    def give(self, request_id: str, inbox: InboxAddress | None) -> InboxPlace | None:
        """Give a request a place in an inbox; None if the inbox is full, or there is none.

        Places are given by turns: an engine that was lost may go on copying into its last one for a moment.
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
        """Return whether no request has a place."""
        return not self._given

    def free(self, *request_ids: str) -> None:
        """Take back the places of requests that need none any more."""
        for each in request_ids:
            self._given.pop(each, None)
