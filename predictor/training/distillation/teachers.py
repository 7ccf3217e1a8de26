"""Train the teachers (encoders and language models) sequentially, and combine their forecasts.

Requires torch and transformers. Used in training only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from predictor.data.prepare import TRAIN, TrainingArrays
from predictor.training import auxiliary_tasks, length_head, networks, train_loop
from predictor.training.distillation import ensemble, lm_teacher
from predictor.training.distillation.recipes import DistillationConfig

Progress = Callable[[str], None]
HEAD_HIDDEN = 256
FOLD_SEED = 99


class TeacherOutput(NamedTuple):
    """The forecasts of a teacher for all rows, its features of all prompts, and the prompts it held out."""

    probabilities: NDArray[np.float16]
    """`[rows, ranges]`"""
    features: NDArray[np.float16] | None
    """Standardised encoder outputs `[prompts, width]`, None unless the student learns to predict them."""
    held_out: NDArray[np.bool_]
    """`[prompts]`"""


class TrainedTeachers(NamedTuple):
    """The targets of all teachers, and the first trained encoder, from which the student is trimmed."""

    targets: train_loop.TeacherTargets
    encoder: nn.Module


def train_teachers(  # noqa: PLR0917 - each is of another type
    data: TrainingArrays,
    encoder: str,
    language_model: str | None,
    config: DistillationConfig,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> TrainedTeachers:
    """Train each teacher on the training prompts outside its fold, and fit the mixture of all teachers.

    Raises DataError if the language model cannot be used.
    """
    first, outputs = None, []
    for number, recipe in enumerate(config.encoders):
        progress(f"teacher {number + 1}, an encoder")
        held_out = held_out_fold(data, number, len(config.encoders) if config.folds else 1)
        masked = replace(config.masked, seed=config.masked.seed + number)
        net = train_encoder(data.hold_out(held_out), encoder, recipe, masked, edges, device, progress)
        outputs.append(_outputs(net, data, held_out, number < config.matched, device))
        first = first or net.body.encoder.cpu()
    if language_model is not None:
        chats = tokenize_chats(data, lm_teacher.ChatTokenizer(language_model))
        for number, recipe in enumerate(config.language_models):
            progress(f"teacher {len(outputs) + 1}, a language model")
            held_out = held_out_fold(data, number, len(config.language_models) if config.folds else 1)
            net = train_language_model(
                chats.hold_out(held_out), language_model, recipe, edges, device, progress
            )
            outputs.append(_outputs(net, chats, held_out, number < config.matched, device))
    forecasts = [each.probabilities for each in outputs]
    mixture = ensemble.fit(forecasts, data, edges, device)
    progress(f"teachers' shares, by group of models: {mixture.weights()}")
    folds = [each.held_out for each in outputs]
    targets = ensemble.distillation_targets(mixture, forecasts, data, folds, config.unread_share)
    features = [each.features for each in outputs if each.features is not None]
    return TrainedTeachers(train_loop.TeacherTargets(targets, np.concatenate(features, axis=1)), first)


def tokenize_chats(data: TrainingArrays, tokenizer: lm_teacher.ChatTokenizer) -> TrainingArrays:
    """Return the data in tokens of a language model: prompts as turns of a chat, and answer prefixes."""
    answers = data.answers
    if answers is not None:
        prefix = tokenizer.encode_padded(answers.texts, lm_teacher.ANSWER_TOKENS)
        answers = answers._replace(prefix=prefix)
    return replace(data, pieces=tokenizer.encode_chats(data.texts), vocabulary=(), answers=answers)


def held_out_fold(data: TrainingArrays, number: int, folds: int) -> NDArray[np.bool_]:
    """Return the mask of the prompts in one of `folds` random folds, all false for a single fold."""
    drawn = np.random.default_rng(FOLD_SEED).integers(0, 1 << 30, len(data.pieces))
    fold: NDArray[np.bool_] = (drawn % folds == number) & (folds > 1)
    return fold


def train_encoder(  # noqa: PLR0917 - each is of another type
    data: TrainingArrays,
    encoder: str,
    config: train_loop.TrainConfig,
    masked_lm: auxiliary_tasks.MaskedLMConfig,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> networks.LengthNet:
    """Train an encoder on lengths and, given texts of answers, on masked pieces and on answers."""
    torch.manual_seed(config.seed)
    body, auxiliary = networks.TeacherEncoder(encoder), None
    if data.answers is not None:
        loss = auxiliary_tasks.train_masked_lm(body.encoder, data, data.answers, masked_lm, device)
        progress(f"masked pieces: loss {loss:.3f}")
        auxiliary = auxiliary_tasks.AnswerTask(
            data.answers, body.width, len(data.models), len(data.vocabulary)
        )
    net, rows = new_net(body, data, edges), data.rows(TRAIN)
    return train_loop.fit(
        net, data, rows, edges, config, auxiliary=auxiliary, device=device, progress=progress
    )


def train_language_model(  # noqa: PLR0917 - each is of another type
    chats: TrainingArrays,
    language_model: str,
    config: train_loop.TrainConfig,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> networks.LengthNet:
    """Train a language model on lengths and, given texts of answers, on their beginnings and shapes."""
    torch.manual_seed(config.seed)
    body, auxiliary = lm_teacher.LanguageModelEncoder(language_model), None
    if chats.answers is not None:
        auxiliary = lm_teacher.AnswerPrefixTask(chats.answers, body, len(chats.models))
    net, rows = new_net(body, chats, edges), chats.rows(TRAIN)
    return train_loop.fit(
        net, chats, rows, edges, config, auxiliary=auxiliary, device=device, progress=progress
    )


def new_net(body: nn.Module, data: TrainingArrays, edges: tuple[int, ...]) -> networks.LengthNet:
    """Return an encoder with a new head, whose standardisation is set from training prompts."""
    side = torch.tensor(data.side[np.unique(data.prompt[data.rows(TRAIN)])])
    config = length_head.HeadConfig(hidden=HEAD_HIDDEN)
    return networks.LengthNet(body, config, side, len(data.models), len(edges) - 1)


def _outputs(
    net: networks.LengthNet, data: TrainingArrays, held_out: NDArray[np.bool_], matched: bool, device: str
) -> TeacherOutput:
    logits = train_loop.predict_logits(net, data, np.arange(len(data.prompt)), device=device)
    probabilities = torch.softmax(torch.tensor(logits), 1).half().numpy()
    if not matched:
        return TeacherOutput(probabilities, None, held_out)
    inputs, _ = train_loop.head_inputs(net, data, np.arange(len(data.pieces)), device=device)
    encoded = inputs[:, : net.body.width]
    standardised = ((encoded - encoded.mean(axis=0)) / (encoded.std(axis=0) + 1e-6)).astype(np.float16)
    return TeacherOutput(probabilities, standardised, held_out)
