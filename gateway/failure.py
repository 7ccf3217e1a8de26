"""Values for failover: the failure of an attempt, and the part of the answer delivered by then."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FailureCause(StrEnum):
    """Why an attempt failed. CONTEXT_LENGTH is the client's mistake if no site has a longer context,
    UNSUPPORTED if no site has the ability, and INVALID always. MODEL_UNKNOWN: the site has stopped serving
    the model since the query was sent.
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
"""Causes for which a query can't be answered at a site, but may be at another."""


class AttemptFailure(NamedTuple):
    """The failure of an attempt at a site. `preferred_site`: the site that bid for a released attempt."""

    site: str
    cause: FailureCause
    message: str
    param: str | None = None
    preferred_site: str | None = None


class Resume(NamedTuple):
    """The part of an answer delivered to the client. `token_ids`: all of its tokens, or () if a site sent no
    token ids. `tokens`: their number.

    `tool_calls`: the number of function calls begun. `argument_chars`: the characters of the last one's
    arguments. `refused`: a part of a refusal was delivered, which no other site can resume.
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
        """Return whether reasoning or a refusal was delivered, which the text does not contain."""
        return bool(self.reasoning_chars or self.refused)

    @property
    def has_output(self) -> bool:
        return bool(self.text or self.tool_calls or self.beside_text)
