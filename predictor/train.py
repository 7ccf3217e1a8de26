"""Training a model from a corpus of prompts and lengths, and writing it as an artifact that serving can load.

`lexical` takes one processor core some minutes; `small` and `large` are layers of a pretrained encoder that
learn from whole ones, for a GPU. Needs the `train` and `engine` extras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from predictor import (
    artifact,
    dataset,
    export,
    features,
    foretell,
    labels,
    learn,
    lexical,
    networks,
    prepare,
    views,
)
from predictor.errors import DataError
from predictor.finish import Trained, finish, places

Progress = Callable[[str], None]
FEW_MODELS = 9
"""Prompts that more models answered teach the head how models differ; of the others it keeps what it says."""
HEAD_HIDDEN = 256
SMALL_NOTES = ("The text encoder is a trimmed part of the configuration's; it learned from two whole ones.",)
SMALL_LICENCES = (("the encoder all-MiniLM-L6-v2, where it was begun from", "Apache-2.0"),)


TEACHER = learn.Recipe(
    epochs=4,
    batch_prompts=160,
    body_rate=1.2e-4,
    head_rate=2e-3,
    rows_per_prompt=12,
    averaged=0.995,
    seed=21,
)
TEACHERS = (TEACHER, replace(TEACHER, rows_per_prompt=10, seed=22))
STUDENT = learn.Recipe(
    epochs=28,
    batch_prompts=512,
    body_rate=5e-4,
    head_rate=2e-3,
    rows_per_prompt=4,
    weight_decay=0.05,
    teacher_share=0.85,
    piece_dropout=0.05,
    match=0.5,
    moved_share=0.3,
    seed=3,
)
MASKED = foretell.Masked()
MODELS = lexical.HeadConfig(epochs=2, learning_rate=5e-4, input_noise=0.1, hidden_dropout=0.2)
KEPT = networks.TrimmedConfig()
LARGE = networks.TrimmedConfig((networks.LayerConfig(12, 1280),) * 6)


@dataclass(frozen=True, slots=True)
class Plan:
    """How an encoder is distilled: teachers, the student taught by them all, then its head on many models."""

    teachers: tuple[learn.Recipe, ...] = TEACHERS
    student: learn.Recipe = STUDENT
    masked: foretell.Masked = MASKED
    models: lexical.HeadConfig = MODELS
    kept: networks.TrimmedConfig = KEPT
    kept_pieces: int = 16_000
    """So many of the vocabulary's pieces, the commonest."""
    made_prompts: int = 250_000
    seed: int = 5


PLANS = {
    "small": Plan(),
    "large": Plan(student=replace(STUDENT, epochs=8, body_rate=1.2e-4, moved_share=0.0), kept=LARGE),
}
KINDS = ("lexical", *PLANS)


def train(
    data: Path,
    out: Path,
    *,
    kind: str = "lexical",
    encoder: str | None = None,
    name: str | None = None,
    device: str | None = None,
    seed: int = 7,
    plan: Plan | None = None,
    progress: Progress = lambda _: None,
) -> artifact.Card:
    """Trains on a corpus and writes the artifact into the folder `out`; the card holds its held-out figures.

    `encoder` is a Hub id or a folder, with a BERT-like model and its `vocab.txt`; `lexical` needs none.
    Where the corpus has answers' texts, in a column `answer`, the encoder's teachers learn from those, too.
    Raises DataError if the data, the kind or the encoder cannot be used.
    """
    torch.set_num_threads(1)
    frame = dataset.read(data)
    parts = dataset.split(frame)
    if kind not in KINDS:
        raise DataError(f"the kind {kind} is none of {', '.join(KINDS)}")
    called = name or artifact.KINDS[kind]
    if kind == "lexical":
        trained = _lexical(frame, parts, called, seed, progress)
    elif encoder is not None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        distilled = _distilled(frame, encoder, called, plan or PLANS[kind], chosen, progress)
        trained = replace(distilled, kind=kind)
    else:
        raise DataError(f"the kind {kind} needs an encoder")
    return finish(trained, data, parts, out, progress)


def _lexical(frame: pd.DataFrame, parts: dataset.Split, name: str, seed: int, progress: Progress) -> Trained:
    prompts = frame.drop_duplicates("prompt_id")
    names = (prepare.UNKNOWN_NAME, *sorted(parts.train.model.unique()))
    edges = labels.log_spaced_edges()
    rows_a_step = max(32, min(1024, len(parts.train) // 200))
    config = lexical.HeadConfig(seed=seed, batch_rows=rows_a_step)
    progress(f"reading {len(prompts)} prompts")
    bags = [features.bag(text) for text in prompts.prompt]
    owner = places(parts.train.prompt_id, prompts.prompt_id)
    learned = views.fit(parts.train, owner, bags, seed, progress)
    scores = learned.scores(bags, learned.folds)
    inputs = np.concatenate([scores, np.stack([bag.dense for bag in bags])], axis=1).astype(np.float32)
    rows = lexical.Rows(
        owner,
        places(parts.train.model, names),
        labels.soft_targets(parts.train.response_tokens.to_numpy(), edges, config.spread_octaves),
        dataset.row_weights(parts.train),
    )
    head = lexical.fit(inputs, rows, len(names), config, progress)
    even = np.ones(len(names), dtype=np.float32)
    graph = export.lexical_graph(learned.table, lexical.state_of(head), even)
    told = {**asdict(config), "views": list(learned.names)}
    return Trained(graph, name, "lexical", names, edges, told)


def _distilled(  # noqa: PLR0917 - private, and each is of another type
    frame: pd.DataFrame, encoder: str, name: str, plan: Plan, device: str, progress: Progress
) -> Trained:
    edges = labels.log_spaced_edges()
    data = prepare.prepare(frame, vocabulary_of(encoder), made=plan.made_prompts, seed=7, progress=progress)
    if data.answers is None:
        progress("the corpus has no answers' texts in a column `answer`: teachers learn from lengths alone")
    teachers = [
        _teacher(data, encoder, recipe, plan.masked, edges, device, progress) for recipe in plan.teachers
    ]
    taught = _taught(teachers, data, device)
    kept = data.commonest_pieces(plan.kept_pieces)
    data, first = data.with_pieces(kept), teachers[0].body.encoder.cpu()
    networks.keep_pieces(first, kept.tolist())
    torch.manual_seed(plan.seed)
    net = _with_head(networks.Trimmed(plan.kept, first), data, edges)
    rows = data.rows(prepare.TRAIN, prepare.MADE)
    learn.fit(net, data, rows, edges, plan.student, taught=taught, device=device, progress=progress)
    _learn_models(net.cpu(), data, edges, plan.models, progress)
    graph = graph_of(net, data.table, plan.kept)
    told = {**asdict(plan), "encoder": Path(encoder).name, "views": list(data.views)}
    return Trained(
        graph, name, "small", data.models, edges, told, data.vocabulary, SMALL_NOTES, SMALL_LICENCES
    )


def vocabulary_of(encoder: str) -> tuple[str, ...]:
    """The word pieces of an encoder in a folder or on the Hub, in order of their ids."""
    from transformers import AutoTokenizer

    try:
        ids: dict[str, int] = AutoTokenizer.from_pretrained(encoder).get_vocab()
    except (OSError, ValueError) as error:
        raise DataError(f"the encoder {encoder} cannot be read: {error}") from error
    return tuple(sorted(ids, key=ids.__getitem__))


def graph_of(net: networks.LengthNet, table: NDArray[np.float32], kept: networks.TrimmedConfig) -> bytes:
    """The served graph of a trained small net, not calibrated yet."""
    state = {key: value.detach().float().numpy() for key, value in net.state_dict().items()}
    body = {key.removeprefix("body."): value for key, value in state.items() if key.startswith("body.")}
    head = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    even = np.ones(len(head["models.weight"]), dtype=np.float32)
    heads = [each.heads for each in kept.layers]
    return export.student_graph(table, body, head, even, heads=heads, query_heads=kept.query_heads)


def _teacher(  # noqa: PLR0917 - private, and each is of another type
    data: prepare.Prepared,
    encoder: str,
    recipe: learn.Recipe,
    masked: foretell.Masked,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> networks.LengthNet:
    progress(f"teacher {recipe.seed}")
    torch.manual_seed(recipe.seed)
    body, beside = networks.Teacher(encoder), None
    if data.answers is not None:
        loss = foretell.read_masked(body.encoder, data, data.answers, masked, device)
        progress(f"masked pieces: loss {loss:.3f}")
        beside = foretell.AnswerTask(data.answers, body.width, len(data.models), len(data.vocabulary))
    net = _with_head(body, data, edges)
    rows = data.rows(prepare.TRAIN)
    return learn.fit(net, data, rows, edges, recipe, beside=beside, device=device, progress=progress)


def _learn_models(
    net: networks.LengthNet,
    data: prepare.Prepared,
    edges: tuple[int, ...],
    config: lexical.HeadConfig,
    progress: Progress,
) -> None:
    """Tunes the head on every row of prompts that many models answered, while it rehearses the rest."""
    rows = data.rows(prepare.TRAIN)
    inputs, owner = learn.inputs_of(net, data, data.prompt[rows])
    answers = np.bincount(owner)[owner]
    model = data.model[rows]
    target = labels.soft_targets(data.length[rows], edges, config.spread_octaves)
    few = answers <= FEW_MODELS
    said = lexical.logits_of(net.head, inputs, owner[few], model[few])
    target[few] = torch.softmax(torch.tensor(said), 1).numpy()
    weight = (1.0 / np.sqrt(answers)).astype(np.float32)
    lexical.tune(net.head, inputs, lexical.Rows(owner, model, target, weight), config, progress)


def _with_head(body: torch.nn.Module, data: prepare.Prepared, edges: tuple[int, ...]) -> networks.LengthNet:
    seen = torch.tensor(data.side[np.unique(data.prompt[data.rows(prepare.TRAIN)])])
    config = lexical.HeadConfig(hidden=HEAD_HIDDEN)
    return networks.LengthNet(body, config, seen, len(data.models), len(edges) - 1)


def _taught(teachers: list[networks.LengthNet], data: prepare.Prepared, device: str) -> learn.Taught:
    """The teachers' mean probabilities of every row, and what they read of every prompt."""
    every = np.arange(len(data.prompt))
    total = np.zeros(1, dtype=np.float32)
    reads = []
    for net in teachers:
        logits = torch.tensor(learn.logits_of(net, data, every, device=device))
        total = total + torch.softmax(logits, 1).numpy()
        inputs, _ = learn.inputs_of(net, data, np.arange(len(data.pieces)), device=device)
        read = inputs[:, : net.body.width]
        reads.append((read - read.mean(axis=0)) / (read.std(axis=0) + 1e-6))
    mean = (total / len(teachers)).astype(np.float16)
    return learn.Taught(mean, np.concatenate(reads, axis=1).astype(np.float16))
