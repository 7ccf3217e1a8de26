"""An artifact: a folder with `model.onnx` and the card that says what it is, whence, and how good.

Does not run the model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from predictor.errors import ArtifactError

FORMAT = 2
GRAPH_FILE = "model.onnx"
CARD_FILE = "card.json"
SHIPPED = Path(__file__).parent / "artifacts"
VOCABULARY_FILE = "vocab.txt"
LEXICAL_NAME = "lexical-v1"
SMALL_NAME = "small-v4"
LARGE_NAME = "large-v3"
DEFAULT_NAME = SMALL_NAME
KINDS = {"lexical": LEXICAL_NAME, "small": SMALL_NAME, "large": LARGE_NAME}
"""What is shipped, by the word that chooses it."""


@dataclass(frozen=True, slots=True)
class Card:
    """Everything a reader or a server needs to know of a model besides its weights."""

    name: str
    kind: str
    edges: tuple[int, ...]
    models: tuple[str, ...]
    """Row 0 stands for every model that was not trained on."""
    digest: str
    """SHA-256 of `model.onnx`."""
    vocabulary_digest: str = ""
    """SHA-256 of `vocab.txt`, where the model reads word pieces."""
    aliases: dict[str, str] = field(default_factory=dict)
    trained_on: dict[str, Any] = field(default_factory=dict)
    licences: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    format: int = FORMAT


def folder_of(chosen: Path | None) -> Path:
    """The folder of what was chosen: a word of KINDS, or a folder; the default where nothing was."""
    if chosen is None:
        return SHIPPED / DEFAULT_NAME
    return SHIPPED / KINDS[str(chosen)] if str(chosen) in KINDS else chosen


def read_vocabulary(folder: Path, card: Card) -> tuple[str, ...]:
    """The word pieces a model reads, one a line; none for a model that reads words alone."""
    if not card.vocabulary_digest:
        return ()
    try:
        text = (folder / VOCABULARY_FILE).read_bytes()
    except OSError as error:
        raise ArtifactError(f"no predictor artifact in {folder}: {VOCABULARY_FILE} is missing") from error
    if digest_of(text) != card.vocabulary_digest:
        raise ArtifactError(f"{folder / VOCABULARY_FILE} is damaged: its digest is not the one on its card")
    return tuple(text.decode("utf-8").removesuffix("\n").split("\n"))


def vocabulary_bytes(pieces: Sequence[str]) -> bytes:
    """What `vocab.txt` holds."""
    return ("\n".join(pieces) + "\n").encode()


def read_card(folder: Path) -> Card:
    """The card, once it is sure that its format is ours and the graph beside it is its own."""
    try:
        values = json.loads((folder / CARD_FILE).read_text("utf-8"))
        graph = (folder / GRAPH_FILE).read_bytes()
    except FileNotFoundError as error:
        raise ArtifactError(
            f"no predictor artifact in {folder}: {Path(error.filename).name} is missing"
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the predictor artifact in {folder} cannot be read: {error}") from error
    card = _card_of(values, folder)
    if digest_of(graph) != card.digest:
        raise ArtifactError(f"{folder / GRAPH_FILE} is damaged: its digest is not the one on its card")
    return card


def digest_of(graph: bytes) -> str:
    """SHA-256 of a graph, as it stands on a card."""
    return sha256(graph).hexdigest()


def with_figures(card: Card, figures: dict[str, Any]) -> Card:
    """The same card with what was measured."""
    return replace(card, figures=figures)


def write(folder: Path, graph: bytes, card: Card, vocabulary: Sequence[str] = ()) -> None:
    """Writes graph and card; the card last, so that a half-written artifact never loads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD_FILE).unlink(missing_ok=True)
    if vocabulary:
        (folder / VOCABULARY_FILE).write_bytes(vocabulary_bytes(vocabulary))
    (folder / GRAPH_FILE).write_bytes(graph)
    (folder / CARD_FILE).write_text(json.dumps(asdict(card), indent=1, ensure_ascii=False) + "\n", "utf-8")


def export(folder: Path, out: Path) -> Card:
    """The artifact in `folder`, once its digests are right, written into `out`, which must hold none."""
    card = read_card(folder)
    if (out / CARD_FILE).exists():
        raise ArtifactError(f"{out} holds an artifact already")
    write(out, (folder / GRAPH_FILE).read_bytes(), card, read_vocabulary(folder, card))
    return card


def _card_of(values: Any, folder: Path) -> Card:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ArtifactError(f"the card in {folder} is of format {found}; this version reads {FORMAT}")
    try:
        card = Card(**values)
    except TypeError as error:
        raise ArtifactError(f"the card in {folder} does not fit this version: {error}") from error
    return Card(
        **{
            **asdict(card),
            "edges": tuple(card.edges),
            "models": tuple(card.models),
            "notes": tuple(card.notes),
        }
    )
