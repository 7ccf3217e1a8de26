"""The outputs of one iteration, with outputs that are only a token stored in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any

from site_engine.core.request import Output


class StepOutputs(Sequence[Output]):
    """The outputs of one iteration. `request_ids`, `token_ids` and `generated` (tokens so far) are columns of
    the outputs that are only a token; `others` holds all other outputs, which come after the columns.

    If another process detokenizes, most outputs are in the columns: an object per row took the engine's
    thread three times as long.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.token_ids: list[int] = []
        self.generated: list[int] = []
        self.others: list[Output] = []

    @property
    def has_tokens(self) -> bool:
        """Return whether it holds a token. Tokens of later iterations must not precede it in the columns."""
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
