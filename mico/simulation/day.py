"""The arrivals of a day: few by night, many by day."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DAY_S = 86_400.0
QUIETEST_S = 7_200.0
SWING = 0.8
"""At 2:00 a fifth of the mean arrives, at 14:00 nine fifths."""


def times_s(count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Draw the seconds of a day at which so many queries arrive, in order."""
    grid_s = np.linspace(0.0, DAY_S, 1441)
    turn = 2 * np.pi / DAY_S
    waves = np.sin(turn * (grid_s - QUIETEST_S)) + np.sin(turn * QUIETEST_S)
    return np.interp(np.sort(random.random(count)) * DAY_S, grid_s - SWING / turn * waves, grid_s)
