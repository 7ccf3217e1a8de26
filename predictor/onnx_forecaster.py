"""Run a trained model with onnxruntime to forecast lengths.

Requires only numpy and onnxruntime. Synchronous and thread-safe; run long texts off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from predictor import features
from predictor.artifact import GRAPH_FILE, Card, read, resolve_folder
from predictor.errors import ArtifactError
from predictor.forecast import Forecast
from predictor.wordpiece import WordPieceTokenizer, pad

MAX_BATCH_CELLS = 1 << 10
"""The maximum number of slots or pieces in a batch, including padding, which bounds memory."""
WIDTH_SLACK = 16
"""A text joins a batch if its width is at most twice the batch's minimum plus this, to limit padding."""
UNKNOWN_ROW = 0
UNKNOWN_SUFFIX = "unknown-model"


@dataclass(frozen=True, slots=True)
class Features:
    """The inputs of a forecast: the user's last message, the answering model, and the number of the turn.

    `parent` is the model that `model` is a variant of, or empty.
    """

    text: str
    model: str
    turn: int = 1
    parent: str = ""


class Forecaster(Protocol):
    """The interface of forecasters. `forecast` returns one forecast per query, in order."""

    @property
    def name(self) -> str: ...

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]: ...


class EncodedText(NamedTuple):
    """A text as inputs of a model. `pieces` is empty for a model without word pieces."""

    bag: features.Bag
    pieces: list[int]


class OnnxForecaster:
    """Run a trained model.

    Served models that were not trained on use UNKNOWN_ROW, the average of models, and `source` indicates it.
    """

    def __init__(self, folder: Path) -> None:
        artifact = read(folder)
        self.card: Card = artifact.card
        self.name = self.card.name
        vocabulary = artifact.vocabulary
        self._tokenizer = WordPieceTokenizer(vocabulary) if vocabulary else None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            providers = ["CPUExecutionProvider"]
            self._session = onnxruntime.InferenceSession(artifact.graph, options, providers=providers)
        except Exception as error:
            raise ArtifactError(f"{folder / GRAPH_FILE} cannot be run: {error}") from error
        self._rows = {name.casefold(): row for row, name in enumerate(self.card.models)}
        for alias, name in self.card.aliases.items():
            self._rows[alias.casefold()] = self._rows[name.casefold()]

    def knows(self, model: str) -> bool:
        """Return whether this served model, or the model it is an alias of, was trained on."""
        return self.row(model) != UNKNOWN_ROW

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        rows = np.array([self.row(query.model) for query in queries], dtype=np.int64)
        probabilities = self.probabilities([query.text for query in queries], np.arange(len(queries)), rows)
        names = [self.name if row != UNKNOWN_ROW else f"{self.name}:{UNKNOWN_SUFFIX}" for row in rows]
        pairs = zip(probabilities.tolist(), names, strict=True)
        return [Forecast(self.card.edges, tuple(each), name) for each, name in pairs]

    def probabilities(
        self, texts: Sequence[str], owner: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return probabilities `[rows, ranges]` of text `owner[i]` and the model in row `rows[i]` of a card.

        Encodes each text once, independent of its number of rows.
        """
        encoded = self.encode(texts)
        if len(encoded) == 1:
            return self._run(encoded, owner, rows)
        result = np.empty((len(owner), len(self.card.edges) - 1))
        for batch in _batches_by_width([len(each.pieces) or len(each.bag.slots) for each in encoded]):
            position = np.full(len(texts), -1)
            position[batch] = np.arange(len(batch))
            in_batch = position[owner] >= 0
            result[in_batch] = self._run(
                [encoded[index] for index in batch], position[owner[in_batch]], rows[in_batch]
            )
        return result

    def row(self, model: str) -> int:
        """Return the row of a served model or of the model it is an alias of; else UNKNOWN_ROW."""
        return self._rows.get(model.casefold(), UNKNOWN_ROW)

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return the features and word pieces of texts."""
        encode = self._tokenizer.encode if self._tokenizer else lambda _: []
        return [EncodedText(bag, encode(text)) for bag, text in zip(features.bags(texts), texts, strict=True)]

    def _run(
        self, encoded: list[EncodedText], owner: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        batch = features.batch([each.bag for each in encoded])
        inputs = {"slots": batch.slots, "weights": batch.weights, "dense": batch.dense}
        inputs |= {"owner": owner, "model": rows}
        if self._tokenizer:
            inputs["pieces"] = pad([each.pieces for each in encoded])
        probabilities = self._session.run(["probabilities"], inputs)[0].astype(np.float64)
        normalised: NDArray[np.float64] = probabilities / probabilities.sum(axis=1, keepdims=True)
        return normalised


def load(path: Path | None = None) -> Forecaster:
    """Load the artifact of a path or kind, see `artifact.resolve_folder`. Raises ArtifactError."""
    return OnnxForecaster(resolve_folder(path))


def _batches_by_width(widths: Sequence[int]) -> list[list[int]]:
    """Group indices by similar width. Each group has at most MAX_BATCH_CELLS cells after padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(widths)), key=widths.__getitem__):
        width = max(1, widths[index])
        similar = groups and width <= 2 * widths[groups[-1][0]] + WIDTH_SLACK
        if not similar or (len(groups[-1]) + 1) * width > MAX_BATCH_CELLS:
            groups.append([])
        groups[-1].append(index)
    return groups
