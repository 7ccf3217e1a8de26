"""Values for failover: the failure of an attempt, and the part of the answer that the client has by then."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FailureCause(StrEnum):
    """Why an attempt failed. The first two are mistakes of the client: CONTEXT_LENGTH only if no site has a
    longer context, INVALID at every site. UNSUPPORTED is one if no site can do it. MODEL_UNKNOWN: the site
    has lost the model since the query was sent there.
    """

    CONTEXT_LENGTH = "context_length"
    INVALID = "invalid"
    FULL = "full"
    DRAINING = "draining"
    UNSUPPORTED = "unsupported"
    MODEL_UNKNOWN = "model_unknown"
    FAILED = "failed"
    LOST = "lost"
    RELEASED = "released"
    CANCELLED = "cancelled"


INABILITIES = frozenset((FailureCause.CONTEXT_LENGTH, FailureCause.UNSUPPORTED, FailureCause.MODEL_UNKNOWN))
"""Causes for which the query can never be answered at that site, but maybe at another."""


class AttemptFailure(NamedTuple):
    """The failure of an attempt at a site. `preferred_site` is the site that bid for a released attempt."""

    site: str
    cause: FailureCause
    message: str
    param: str | None = None
    preferred_site: str | None = None


class Resume(NamedTuple):
    """The part of an answer that the client has. `token_ids`: all of them, or none where a site named none.

    `tool_calls` counts the function calls that have begun, `argument_chars` the last one's arguments.
    `refused`: a refusal was delivered, which no other site can go on from.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    tokens: int = 0
    tool_calls: int = 0
    argument_chars: int = 0
    reasoning_chars: int = 0
    refused: bool = False

    @property
    def beside_text(self) -> bool:
        """Return whether more was delivered than a text can say."""
        return bool(self.reasoning_chars or self.refused)

    @property
    def has_output(self) -> bool:
        return bool(self.text or self.tool_calls or self.beside_text)
