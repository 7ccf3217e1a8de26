"""The artifact in force: a forecaster that takes up a new artifact in its folder without a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from predictor.artifact import CARD_FILE, folder_of, read_card
from predictor.errors import ArtifactError
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.unseen_models import BorrowingForecaster


class CurrentForecaster:
    """Serves what is in a folder or shipped. `refresh` is for a caller's own clock, off its event loop.

    A damaged or half-written artifact is refused, and the one in force stays.
    """

    def __init__(self, chosen: Path | None = None) -> None:
        self._folder = folder_of(chosen)
        self._written = self._last_write()
        self._serving = BorrowingForecaster(OnnxForecaster(self._folder))

    @property
    def name(self) -> str:
        return self._serving.name

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        return self._serving.forecast(queries)

    def observe(self, query: Features, tokens: int) -> None:
        """A whole answer: what is not known of the model that gave it is learned from it."""
        self._serving.observe(query, tokens)

    def refresh(self) -> bool:
        """Takes up the artifact in the folder if it is another; says whether it did. Raises ArtifactError."""
        written = self._last_write()
        if written == self._written:
            return False
        another = read_card(self._folder) != self._serving.serving.card
        if another:
            self._serving = BorrowingForecaster(OnnxForecaster(self._folder))
        self._written = written
        return another

    def _last_write(self) -> int:
        """A card is written last, so its time tells of any change."""
        try:
            return (self._folder / CARD_FILE).stat().st_mtime_ns
        except OSError as error:
            raise ArtifactError(f"no predictor artifact in {self._folder}: {CARD_FILE} is missing") from error
