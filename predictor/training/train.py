"""Training a model from a corpus of prompts and lengths, and writing it as an artifact that serving can load.

`lexical` takes one processor core some minutes; `small` and `large` are layers of a pretrained encoder that
learn from whole ones and from language models, for a GPU. Needs the `train` and `engine` extras.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from predictor import artifact, features
from predictor.data import augment, dataset, labels, lexical_scores, prepare
from predictor.data.licences import MODEL_LICENCES, UNSTATED
from predictor.errors import DataError
from predictor.training import export, length_head, networks, train_loop
from predictor.training.distillation import synthetic_prompts, teachers
from predictor.training.distillation.recipes import LANGUAGE_PLANS, PLANS, Plan
from predictor.training.finalize import Trained, finish, places

Progress = Callable[[str], None]
KINDS = ("lexical", *PLANS)
FEW_MODELS = 9
"""Prompts that more models answered teach the head how models differ; of the others it keeps what it says."""
BEGUN_FROM = "The text encoder is a trimmed part of the configuration's; it learned from {}."
LANGUAGE_WORK = "the language model {}, a teacher and the asker of made prompts"
ENCODER_WORK = "the encoder {}, where it was begun from"


def train(
    data: Path,
    out: Path,
    *,
    kind: str = "lexical",
    encoder: str | None = None,
    language_model: str | None = None,
    name: str | None = None,
    device: str | None = None,
    seed: int = 7,
    buckets: int | None = None,
    max_length: int = labels.MAX_LENGTH_TOKENS,
    plan: Plan | None = None,
    progress: Progress = lambda _: None,
) -> artifact.Card:
    """Trains on a corpus and writes the artifact into the folder `out`; the card holds its held-out figures.

    `encoder` is a Hub id or a folder, with a BERT-like model and its `vocab.txt`; `lexical` needs none.
    `language_model`, likewise, is a causal one with a tokenizer: it asks further prompts, and it teaches.
    Where the corpus has answers' texts, in a column `answer`, teachers learn from those, too.
    It is called `name`, or as its folder is: what it forecast is told from what a shipped one did by that.
    Lengths up to `longest` tokens are told apart, in `buckets` of equal width or in ranges that grow.
    Raises DataError if the data, the kind, the encoder or the language model cannot be used.
    """
    torch.set_num_threads(1)
    frame = dataset.read(data)
    parts = dataset.split(frame)
    if kind not in KINDS:
        raise DataError(f"the kind {kind} is none of {', '.join(KINDS)}")
    if kind == "lexical" and language_model is not None:
        raise DataError("the kind lexical learns from no language model")
    if buckets is not None and not 2 <= buckets <= max_length:
        raise DataError(f"{max_length} tokens are not told apart in {buckets} buckets")
    _demand_enough(data, parts)
    edges = (
        labels.log_spaced_edges(max_length)
        if buckets is None
        else labels.equal_width_edges(buckets, max_length)
    )
    called = name or _own_name(out)
    if kind == "lexical":
        trained = _lexical(frame, parts, called, seed, progress, edges=edges)
    elif encoder is not None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        followed = plan or (LANGUAGE_PLANS if language_model else PLANS)[kind]
        distilled = _distilled(
            frame, encoder, language_model, called, followed, chosen, progress, edges=edges
        )
        trained = replace(distilled, kind=kind)
    else:
        raise DataError(f"the kind {kind} needs an encoder: --encoder FOLDER, or its id on the Hub")
    return finish(trained, data, parts, out, progress)


def _demand_enough(data: Path, parts: dataset.Split) -> None:
    """Every step needs a prompt at least; regressions need one for each of their folds."""
    known = parts.train.model.unique()
    if prepare.UNKNOWN_MODEL_NAME in known:
        raise DataError(
            f"{data} has a model {prepare.UNKNOWN_MODEL_NAME}: that is what all others are called"
        )
    calibration, held_out = (part[part.model.isin(known)] for part in (parts.calibration, parts.held_out))
    prompts = [part.prompt_id.nunique() for part in (parts.train, calibration, held_out)]
    if prompts[0] < lexical_scores.FOLDS or not prompts[1] or not prompts[2]:
        raise DataError(
            f"{data} has {prompts[0]} prompts to learn from, {prompts[1]} to calibrate and {prompts[2]} to "
            "measure on, answered by models learned from; "
            f"at least {lexical_scores.FOLDS}, 1 and 1 are needed"
        )


def _own_name(out: Path) -> str:
    called = out.resolve().name
    if called in artifact.KINDS.values():
        raise DataError(
            f"{called} is what a shipped artifact is called: give yours a name, or another folder"
        )
    return called


def _lexical(
    frame: pd.DataFrame,
    parts: dataset.Split,
    name: str,
    seed: int,
    progress: Progress,
    *,
    edges: tuple[int, ...],
) -> Trained:
    prompts = frame.drop_duplicates("prompt_id")
    names = (prepare.UNKNOWN_MODEL_NAME, *sorted(parts.train.model.unique()))
    rows_a_step = max(32, min(1024, len(parts.train) // 200))
    config = length_head.HeadConfig(seed=seed, batch_rows=rows_a_step)
    progress(f"reading {len(prompts)} prompts")
    bags = [features.bag(text) for text in prompts.prompt]
    owner = places(parts.train.prompt_id, prompts.prompt_id)
    learned = lexical_scores.fit(parts.train, owner, bags, seed, progress)
    scores = learned.scores(bags, learned.folds)
    inputs = np.concatenate([scores, np.stack([bag.dense for bag in bags])], axis=1).astype(np.float32)
    rows = length_head.Rows(
        owner,
        places(parts.train.model, names),
        labels.soft_targets(parts.train.response_tokens.to_numpy(), edges, config.spread_octaves),
        dataset.row_weights(parts.train),
    )
    head = length_head.fit(inputs, rows, len(names), config, progress)
    even = np.ones(len(names), dtype=np.float32)
    graph = export.lexical_graph(learned.table, length_head.state_of(head), even)
    told = {**asdict(config), "views": list(learned.names)}
    return Trained(graph, name, "lexical", names, edges, told)


def _distilled(  # noqa: PLR0917 - private, and each is of another type
    frame: pd.DataFrame,
    encoder: str,
    language_model: str | None,
    name: str,
    plan: Plan,
    device: str,
    progress: Progress,
    *,
    edges: tuple[int, ...],
) -> Trained:
    vocabulary = vocabulary_of(encoder)
    generated_prompts: list[augment.GeneratedPrompt] = []
    if language_model is not None and plan.asked_prompts:
        generated_prompts = _asked(frame, language_model, plan, device, progress)
    data = prepare.prepare(
        frame,
        vocabulary,
        mixed=plan.mixed_prompts,
        seed=7,
        generated=generated_prompts,
        progress=progress,
    )
    if data.answers is None:
        progress("the corpus has no answers' texts in a column `answer`: teachers learn from lengths alone")
    lessons = teachers.teach(data, encoder, language_model, plan, edges, device, progress)
    kept = data.most_common_pieces(plan.kept_pieces)
    data = data.with_vocabulary(kept)
    networks.keep_pieces(lessons.encoder, kept.tolist())
    torch.manual_seed(plan.seed)
    net = teachers.with_head(networks.Trimmed(plan.kept, lessons.encoder), data, edges)
    rows = data.rows(prepare.TRAIN, prepare.SYNTHETIC)
    train_loop.fit(
        net, data, rows, edges, plan.student, taught=lessons.taught, device=device, progress=progress
    )
    _learn_models(net.cpu(), data, edges, plan.models, progress)
    graph = graph_of(net, data.table, plan.kept)
    began_from = Path(encoder).name
    told = {**asdict(plan), "encoder": began_from, "views": list(data.views)}
    learned_from = f"{len(plan.encoders)} whole ones"
    licences = [(ENCODER_WORK.format(began_from), MODEL_LICENCES.get(began_from, UNSTATED))]
    if language_model is not None:
        told["language_model"] = called = Path(language_model).name
        learned_from += f" and {len(plan.language_models)} language models"
        licences.append((LANGUAGE_WORK.format(called), MODEL_LICENCES.get(called, UNSTATED)))
    notes = (BEGUN_FROM.format(learned_from),)
    return Trained(graph, name, "small", data.models, edges, told, data.vocabulary, notes, tuple(licences))


def _asked(
    frame: pd.DataFrame, language_model: str, plan: Plan, device: str, progress: Progress
) -> list[augment.GeneratedPrompt]:
    prompts = dataset.split(frame).train.drop_duplicates("prompt_id")
    return synthetic_prompts.ask(
        list(prompts.prompt),
        list(prompts.source),
        language_model,
        plan.asked_prompts,
        plan.asking,
        known=frozenset(frame.prompt),
        device=device,
        progress=progress,
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


def _learn_models(
    net: networks.LengthNet,
    data: prepare.TrainingArrays,
    edges: tuple[int, ...],
    config: length_head.HeadConfig,
    progress: Progress,
) -> None:
    """Tunes the head on every row of prompts that many models answered, while it rehearses the rest."""
    rows = data.rows(prepare.TRAIN)
    inputs, owner = train_loop.inputs_of(net, data, data.prompt[rows])
    answers = np.bincount(owner)[owner]
    model = data.model[rows]
    target = labels.soft_targets(data.length[rows], edges, config.spread_octaves)
    few = answers <= FEW_MODELS
    said = length_head.logits_of(net.head, inputs, owner[few], model[few])
    target[few] = torch.softmax(torch.tensor(said), 1).numpy()
    weight = (1.0 / np.sqrt(answers)).astype(np.float32)
    length_head.tune(net.head, inputs, length_head.Rows(owner, model, target, weight), config, progress)
