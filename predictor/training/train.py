"""Train a model on a corpus of prompts and lengths, and write it as an artifact for serving.

Training `lexical` takes some minutes on one CPU core. `small` and `large` are layers of a pretrained encoder,
distilled from whole encoders and from language models on a GPU. Requires the `train` and `engine` extras.
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
from predictor.data import dataset, labels, lexical_scores, prepare
from predictor.data.augment import GeneratedPrompt
from predictor.data.licences import MODEL_LICENCES, UNSTATED
from predictor.errors import DataError
from predictor.training import export, length_head, networks, train_loop
from predictor.training.distillation import synthetic_prompts, teachers
from predictor.training.distillation.recipes import CONFIGS, LANGUAGE_MODEL_CONFIGS, DistillationConfig
from predictor.training.finalize import UncalibratedModel, finalize, index_in

Progress = Callable[[str], None]
KINDS = ("lexical", *CONFIGS)
FEW_MODELS = 9
"""Prompts with more answers than this train the head on outcomes. On others it keeps its forecasts."""
ENCODER_NOTE = "The text encoder is a trimmed part of the configuration's; it learned from {}."
LANGUAGE_MODEL_LICENCE = "the language model {}, a teacher and the asker of made prompts"
ENCODER_LICENCE = "the encoder {}, where it was begun from"


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
    distillation: DistillationConfig | None = None,
    progress: Progress = lambda _: None,
) -> artifact.Card:
    """Train on a corpus, write the artifact into the folder `out`, and return its card with held-out figures.

    `encoder` is the Hub id or folder of a BERT-like model with its tokenizer, not used by `lexical`.
    `language_model` is the Hub id or folder of a causal model with its tokenizer, which generates further
    prompts and is a teacher. If the corpus has a column `answer`, teachers learn from the texts of answers as
    well. `name` is the name of the artifact and the source of its forecasts, by default the folder's name.
    Forecasts cover lengths up to `max_length` tokens, in `buckets` ranges of equal width or, by default, in
    logarithmically spaced ranges. Raises DataError if the data, the kind, the encoder or the language model
    cannot be used.
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
    _require_enough(data, parts)
    if buckets is None:
        edges = labels.log_spaced_edges(max_length)
    else:
        edges = labels.equal_width_edges(buckets, max_length)
    name = name or _name_of_folder(out)
    if kind == "lexical":
        trained = _train_lexical(frame, parts, name, seed, edges, progress)
    elif encoder is not None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        config = distillation or (LANGUAGE_MODEL_CONFIGS if language_model else CONFIGS)[kind]
        distilled = _distill(frame, encoder, language_model, name, config, device, edges, progress)
        trained = replace(distilled, kind=kind)
    else:
        raise DataError(f"the kind {kind} needs an encoder: --encoder FOLDER, or its id on the Hub")
    return finalize(trained, data, parts, out, progress)


def _require_enough(data: Path, parts: dataset.Split) -> None:
    """Raise DataError unless each part has a prompt, and training has at least one per regression fold."""
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


def _name_of_folder(out: Path) -> str:
    """Return the name of the folder. Raises DataError if a shipped artifact has that name."""
    name = out.resolve().name
    if name in artifact.KINDS.values():
        raise DataError(f"{name} is what a shipped artifact is called: give yours a name, or another folder")
    return name


def _train_lexical(  # noqa: PLR0917 - private, and each is of another type
    frame: pd.DataFrame,
    parts: dataset.Split,
    name: str,
    seed: int,
    edges: tuple[int, ...],
    progress: Progress,
) -> UncalibratedModel:
    prompts = frame.drop_duplicates("prompt_id")
    models = (prepare.UNKNOWN_MODEL_NAME, *sorted(parts.train.model.unique()))
    batch_rows = max(32, min(1024, len(parts.train) // 200))
    config = length_head.HeadConfig(seed=seed, batch_rows=batch_rows)
    progress(f"reading {len(prompts)} prompts")
    bags = [features.bag(text) for text in prompts.prompt]
    owner = index_in(prompts.prompt_id, parts.train.prompt_id)
    scorer = lexical_scores.fit(parts.train, owner, bags, seed, progress)
    scores = scorer.scores(bags, scorer.folds)
    inputs = np.concatenate([scores, np.stack([bag.dense for bag in bags])], axis=1).astype(np.float32)
    rows = length_head.HeadRows(
        owner,
        index_in(models, parts.train.model),
        labels.soft_targets(parts.train.response_tokens.to_numpy(), edges, config.spread_octaves),
        dataset.row_weights(parts.train),
    )
    head = length_head.fit(inputs, rows, len(models), config, progress)
    sharpness = np.ones(len(models), dtype=np.float32)
    graph = export.lexical_graph(scorer.table, length_head.head_state(head), sharpness)
    settings = {**asdict(config), "views": list(scorer.names)}
    return UncalibratedModel(graph, name, "lexical", models, edges, settings)


def _distill(  # noqa: PLR0917 - private, and each is of another type
    frame: pd.DataFrame,
    encoder: str,
    language_model: str | None,
    name: str,
    config: DistillationConfig,
    device: str,
    edges: tuple[int, ...],
    progress: Progress,
) -> UncalibratedModel:
    data = _prepare(frame, encoder, language_model, config, device, progress)
    trained = teachers.train_teachers(data, encoder, language_model, config, edges, device, progress)
    kept = data.most_common_pieces(config.kept_pieces)
    data = data.with_vocabulary(kept)
    networks.prune_embeddings(trained.encoder, kept.tolist())
    torch.manual_seed(config.seed)
    student = teachers.new_net(networks.TrimmedEncoder(config.kept, trained.encoder), data, edges)
    rows = data.rows(prepare.TRAIN, prepare.SYNTHETIC)
    train_loop.fit(
        student, data, rows, edges, config.student, teachers=trained.targets, device=device, progress=progress
    )
    _tune_head(student.cpu(), data, edges, config.models, progress)
    graph = export_student(student, data.table, config.kept)
    encoder_name = Path(encoder).name
    settings = {**asdict(config), "encoder": encoder_name, "views": list(data.views)}
    learned_from = f"{len(config.encoders)} whole ones"
    licences = [(ENCODER_LICENCE.format(encoder_name), MODEL_LICENCES.get(encoder_name, UNSTATED))]
    if language_model is not None:
        settings["language_model"] = lm_name = Path(language_model).name
        learned_from += f" and {len(config.language_models)} language models"
        licences.append((LANGUAGE_MODEL_LICENCE.format(lm_name), MODEL_LICENCES.get(lm_name, UNSTATED)))
    return UncalibratedModel(
        graph,
        name,
        "small",
        data.models,
        edges,
        settings,
        vocabulary=data.vocabulary,
        notes=(ENCODER_NOTE.format(learned_from),),
        licences=tuple(licences),
    )


def _prepare(  # noqa: PLR0917 - private, and each is of another type
    frame: pd.DataFrame,
    encoder: str,
    language_model: str | None,
    config: DistillationConfig,
    device: str,
    progress: Progress,
) -> prepare.TrainingArrays:
    """Return the corpus as arrays, with mixed prompts and, given a language model, generated prompts."""
    vocabulary = read_vocabulary(encoder)
    generated: list[GeneratedPrompt] = []
    if language_model is not None and config.asked_prompts:
        prompts = dataset.split(frame).train.drop_duplicates("prompt_id")
        generated = synthetic_prompts.generate_prompts(
            list(prompts.prompt),
            list(prompts.source),
            language_model,
            config.asked_prompts,
            config.asking,
            excluded=frozenset(frame.prompt),
            device=device,
            progress=progress,
        )
    data = prepare.prepare(
        frame, vocabulary, mixed=config.mixed_prompts, seed=7, generated=generated, progress=progress
    )
    if data.answers is None:
        progress("the corpus has no answers' texts in a column `answer`: teachers learn from lengths alone")
    return data


def read_vocabulary(encoder: str) -> tuple[str, ...]:
    """Return the word pieces of an encoder in a folder or on the Hub, ordered by id. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        ids: dict[str, int] = AutoTokenizer.from_pretrained(encoder).get_vocab()
    except (OSError, ValueError) as error:
        raise DataError(f"the encoder {encoder} cannot be read: {error}") from error
    return tuple(sorted(ids, key=ids.__getitem__))


def export_student(
    net: networks.LengthNet, table: NDArray[np.float32], config: networks.TrimmedConfig
) -> bytes:
    """Return the serving graph of a trained student, before calibration."""
    state = {key: value.detach().float().numpy() for key, value in net.state_dict().items()}
    body = {key.removeprefix("body."): value for key, value in state.items() if key.startswith("body.")}
    head = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    sharpness = np.ones(len(head["models.weight"]), dtype=np.float32)
    heads = [each.heads for each in config.layers]
    return export.student_graph(table, body, head, sharpness, heads=heads, query_heads=config.query_heads)


def _tune_head(
    net: networks.LengthNet,
    data: prepare.TrainingArrays,
    edges: tuple[int, ...],
    config: length_head.HeadConfig,
    progress: Progress,
) -> None:
    """Tune the head on outcomes of prompts with more than FEW_MODELS answers; on others it rehearses."""
    rows = data.rows(prepare.TRAIN)
    inputs, owner = train_loop.head_inputs(net, data, data.prompt[rows])
    answers = np.bincount(owner)[owner]
    model = data.model[rows]
    target = labels.soft_targets(data.length[rows], edges, config.spread_octaves)
    few = answers <= FEW_MODELS
    logits = length_head.predict_logits(net.head, inputs, owner[few], model[few])
    target[few] = torch.softmax(torch.tensor(logits), 1).numpy()
    weight = (1.0 / np.sqrt(answers)).astype(np.float32)
    length_head.tune(net.head, inputs, length_head.HeadRows(owner, model, target, weight), config, progress)
