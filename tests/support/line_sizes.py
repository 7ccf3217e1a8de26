"""Gives lines to `order` as it takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gateway.batches.order import LineSizes


class Sized(Protocol):
    @property
    def group(self) -> int: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def response_tokens(self) -> float: ...


def sizes_of(lines: Sequence[Sized]) -> LineSizes:
    return LineSizes(
        np.array([line.group for line in lines], np.int64),
        np.array([line.shared_tokens for line in lines], np.int64),
        np.array([line.prompt_tokens for line in lines], np.int64),
        np.array([line.response_tokens for line in lines], np.float64),
    )
