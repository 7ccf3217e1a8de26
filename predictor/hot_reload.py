"""Reload the served artifact without a restart when the artifact in its folder changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from predictor.artifact import CARD_FILE, read_card, resolve_folder
from predictor.errors import ArtifactError
from predictor.forecast import Forecast
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.unseen_models import UnseenModelForecaster


class HotReloadForecaster:
    """Serve the artifact of a folder or a shipped one. Callers run `refresh` regularly, off the event loop.

    Rejects a damaged or incomplete artifact and keeps the current one.
    """

    def __init__(self, artifact: Path | None = None) -> None:
        self._folder = resolve_folder(artifact)
        self._loaded_mtime_ns = self._card_mtime_ns()
        self._forecaster = UnseenModelForecaster(OnnxForecaster(self._folder))

    @property
    def name(self) -> str:
        return self._forecaster.name

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        return self._forecaster.forecast(queries)

    def observe(self, query: Features, tokens: int, *, ended: bool = True) -> None:
        """Add an outcome, see `UnseenModelForecaster.observe`."""
        self._forecaster.observe(query, tokens, ended=ended)

    def refresh(self) -> bool:
        """Load the artifact in the folder if it changed. Return whether it did. Raises ArtifactError."""
        mtime_ns = self._card_mtime_ns()
        if mtime_ns == self._loaded_mtime_ns:
            return False
        changed = read_card(self._folder) != self._forecaster.base.card
        if changed:
            fresh = UnseenModelForecaster(OnnxForecaster(self._folder))
            fresh.take_over(self._forecaster)
            self._forecaster = fresh
        self._loaded_mtime_ns = mtime_ns
        return changed

    def _card_mtime_ns(self) -> int:
        """Return the modification time of the card, which is written last and changes with any artifact."""
        try:
            return (self._folder / CARD_FILE).stat().st_mtime_ns
        except OSError as error:
            raise ArtifactError(f"no predictor artifact in {self._folder}: {CARD_FILE} is missing") from error
