"""The outputs of one iteration, with those that are a token and nothing else in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any

from site_engine.core.request import Output


class StepOutputs(Sequence[Output]):
    """The outputs of one iteration. `request_ids`, `token_ids` and `generated` are the columns of requests
    that got a token and go on, `generated` with it; `others` has all other outputs, which follow those.

    Where another process makes the text, most outputs are in the columns: an object for each row took the
    engine's thread three times as long.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.token_ids: list[int] = []
        self.generated: list[int] = []
        self.others: list[Output] = []

    @property
    def has_tokens(self) -> bool:
        """Return whether a token is in it, which one of a later iteration must not come before."""
        return bool(self.request_ids) or any(each.token_ids for each in self.others)

    def owners(self) -> set[str]:
        """Return the ids of the requests that have outputs."""
        return {*self.request_ids, *(each.request_id for each in self.others)}

    def __len__(self) -> int:
        return len(self.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[Output]:
        columns = zip(self.request_ids, self.token_ids, self.generated, strict=True)
        return chain(starmap(_token, columns), self.others)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]


def with_more_than_a_token(outputs: Sequence[Output]) -> Sequence[Output]:
    """Return the outputs that are not in columns."""
    return outputs.others if isinstance(outputs, StepOutputs) else outputs


def _token(request_id: str, token_id: int, generated: int) -> Output:
    return Output(request_id, token_ids=(token_id,), completion_tokens=generated)
