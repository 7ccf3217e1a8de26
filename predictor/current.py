"""The artifact in force: a forecaster that takes up a new artifact in its folder without a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from predictor.artifact import DEFAULT_NAME, SHIPPED, read_card
from predictor.forecast import Forecast
from predictor.runtime import Features, OnnxForecaster


class CurrentForecaster:
    """Serves what is in a folder. `refresh` is for a caller's own clock, off its event loop.

    A damaged or half-written artifact is refused, and the one in force stays.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or SHIPPED / DEFAULT_NAME
        self._serving = OnnxForecaster(self._folder)

    @property
    def name(self) -> str:
        return self._serving.name

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        return self._serving.forecast(queries)

    def refresh(self) -> bool:
        """Takes up the artifact in the folder if it is another; says whether it did. Raises ArtifactError."""
        if read_card(self._folder) == self._serving.card:
            return False
        self._serving = OnnxForecaster(self._folder)
        return True
