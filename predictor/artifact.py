"""Read and write artifacts: folders with a graph, a card and, for models with word pieces, a vocabulary.

Does not run the model.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from predictor.errors import ArtifactError

FORMAT = 2
GRAPH_FILE = "model.onnx"
CARD_FILE = "card.json"
NEW_SUFFIX = ".new"
"""Suffix of a new file that is to replace the file without the suffix."""
SHIPPED = Path(__file__).parent / "artifacts"
VOCABULARY_FILE = "vocab.txt"
LEXICAL_NAME = "lexical-v2"
SMALL_NAME = "small-v5"
DEFAULT_NAME = SMALL_NAME
KINDS = {"lexical": LEXICAL_NAME, "small": SMALL_NAME}
"""Names of the shipped artifacts by kind."""


@dataclass(frozen=True, slots=True)
class Card:
    """The metadata of a model: everything besides its weights and its vocabulary."""

    name: str
    kind: str
    edges: tuple[int, ...]
    models: tuple[str, ...]
    """Names by row of the model table. Row 0 represents all models that were not trained on."""
    digest: str
    """SHA-256 of `model.onnx`."""
    vocabulary_digest: str = ""
    """SHA-256 of `vocab.txt`; empty if the model reads no word pieces."""
    aliases: dict[str, str] = field(default_factory=dict)
    trained_on: dict[str, Any] = field(default_factory=dict)
    licences: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    format: int = FORMAT


class Artifact(NamedTuple):
    """A card, its graph, and the vocabulary of word pieces, empty if the graph reads none."""

    card: Card
    graph: bytes
    vocabulary: tuple[str, ...] = ()


def resolve_folder(chosen: Path | None) -> Path:
    """Return the folder of a key of KINDS, a path, or, for None, the default artifact."""
    if chosen is None:
        return SHIPPED / DEFAULT_NAME
    return SHIPPED / KINDS[str(chosen)] if str(chosen) in KINDS else chosen


def encode_vocabulary(pieces: Sequence[str]) -> bytes:
    """Return the contents of `vocab.txt`."""
    return ("\n".join(pieces) + "\n").encode()


def read(folder: Path) -> Artifact:
    """Read an artifact, and verify its format and the digests of its files.

    After an interrupted write, the result is the old artifact or, if all new files are complete, the new one.
    Raises ArtifactError.
    """
    try:
        return _read(folder, CARD_FILE)
    except ArtifactError:
        for card in (CARD_FILE + NEW_SUFFIX, CARD_FILE):  # retry: a concurrent write may have ended meanwhile
            with suppress(ArtifactError):
                return _read(folder, card)
        raise


def read_card(folder: Path) -> Card:
    """Read the card of an artifact, and verify the whole artifact as `read` does."""
    return read(folder).card


def _read(folder: Path, name: str) -> Artifact:
    try:
        values = json.loads((folder / name).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"no predictor artifact in {folder}: {name} is missing") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the predictor artifact in {folder} cannot be read: {error}") from error
    card = _parse_card(values, folder)
    graph = _read_part(folder, GRAPH_FILE, card.digest)
    if not card.vocabulary_digest:
        return Artifact(card, graph)
    vocabulary = _read_part(folder, VOCABULARY_FILE, card.vocabulary_digest)
    return Artifact(card, graph, tuple(vocabulary.decode("utf-8").removesuffix("\n").split("\n")))


def _read_part(folder: Path, name: str, digest: str) -> bytes:
    """Return the content with that digest, from the file `name` or from the new file that replaces it."""
    missing = True
    for each in (name, name + NEW_SUFFIX):
        try:
            content = (folder / each).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ArtifactError(f"the predictor artifact in {folder} cannot be read: {error}") from error
        if digest_of(content) == digest:
            return content
        missing = False
    if missing:
        raise ArtifactError(f"no predictor artifact in {folder}: {name} is missing")
    raise ArtifactError(f"{folder / name} is damaged: its digest is not the one on its card")


def digest_of(graph: bytes) -> str:
    """Return the SHA-256 of a file's content in hexadecimal, as recorded in a card."""
    return sha256(graph).hexdigest()


def write(
    folder: Path, graph: bytes, card: Card, vocabulary: Sequence[str] = (), *, replacing: Card | None = None
) -> None:
    """Replace the artifact in a folder. The old one stays valid until all new files are on disk.

    `replacing` is the card expected in the folder. Raises ArtifactError if the folder has another card.
    """
    parts = {VOCABULARY_FILE: encode_vocabulary(vocabulary)} if vocabulary else {}
    parts[GRAPH_FILE] = graph
    parts[CARD_FILE] = (json.dumps(asdict(card), indent=1, ensure_ascii=False) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(folder):
        if replacing is not None and read_card(folder) != replacing:
            raise ArtifactError(
                f"another update wrote the artifact in {folder} meanwhile; start this one again"
            )
        _finish_interrupted(folder)
        try:
            for name, content in parts.items():
                _write_synced(folder / (name + NEW_SUFFIX), content)
        except OSError:
            for name in parts:
                (folder / (name + NEW_SUFFIX)).unlink(missing_ok=True)
            raise
        _put_in_place(folder)


def _finish_interrupted(folder: Path) -> None:
    """Complete an interrupted write if only its new files are valid: a later write overwrites them."""
    try:
        _read(folder, CARD_FILE)
    except ArtifactError:
        with suppress(ArtifactError):
            _read(folder, CARD_FILE + NEW_SUFFIX)
            _put_in_place(folder)


def _put_in_place(folder: Path) -> None:
    for name in (VOCABULARY_FILE, GRAPH_FILE, CARD_FILE):  # the card last: until then the new card is valid
        with suppress(FileNotFoundError):
            (folder / (name + NEW_SUFFIX)).replace(folder / name)


@contextmanager
def _exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock against other writers, if the file system supports it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _write_synced(file: Path, content: bytes) -> None:
    """Write a file, and sync it to disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def export(folder: Path, out: Path) -> Card:
    """Verify the artifact in `folder`, and copy it to `out`. Raises ArtifactError if `out` has one."""
    artifact = read(folder)
    if (out / CARD_FILE).exists():
        raise ArtifactError(f"{out} holds an artifact already")
    write(out, artifact.graph, artifact.card, artifact.vocabulary)
    return artifact.card


def _parse_card(values: Any, folder: Path) -> Card:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise ArtifactError(f"the card in {folder} is of format {found}; this version reads {FORMAT}")
    try:
        card = Card(**values)
        card = replace(card, edges=tuple(card.edges), models=tuple(card.models), notes=tuple(card.notes))
    except TypeError as error:
        raise ArtifactError(f"the card in {folder} does not fit this version: {error}") from error
    known = {name.casefold() for name in card.models}
    for alias, name in card.aliases.items():
        if name.casefold() not in known:
            raise ArtifactError(
                f"the card in {folder} has an alias {alias} of {name}, which is not its model"
            )
    return card
