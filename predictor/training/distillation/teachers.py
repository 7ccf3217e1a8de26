"""Teachers: whole encoders and language models, tuned one after another, and what they say together.

Needs torch and transformers; training only.
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
from predictor.training.distillation.recipes import Plan

Progress = Callable[[str], None]
HEAD_HIDDEN = 256
FOLD_SEED = 99


class Said(NamedTuple):
    """What one teacher says of every row `[rows, ranges]`, what it read of every prompt `[prompts, width]`
    if that is to be matched, and which prompts it left out `[prompts]`."""

    probabilities: NDArray[np.float16]
    read: NDArray[np.float16] | None
    unread: NDArray[np.bool_]


class Lessons(NamedTuple):
    """What all teachers together say, and the first encoder as it was tuned, which a student begins from."""

    taught: train_loop.Taught
    encoder: nn.Module


def teach(  # noqa: PLR0917 - each is of another type
    data: TrainingArrays,
    encoder: str,
    language_model: str | None,
    plan: Plan,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> Lessons:
    """Tunes the teachers of a plan, each on the training prompts but its fold, and fits their shares.

    Raises DataError if the language model cannot be used.
    """
    first, said = None, []
    for number, recipe in enumerate(plan.encoders):
        progress(f"teacher {number + 1}, an encoder")
        unread = fold_of(data, number, len(plan.encoders) if plan.folds else 1)
        own, masked = data.hold_out(unread), replace(plan.masked, seed=plan.masked.seed + number)
        net = encoder_teacher(own, encoder, recipe, masked, edges, device, progress)
        said.append(_said(net, data, unread, number < plan.matched, device))
        first = first or net.body.encoder.cpu()
    if language_model is not None:
        chats = chats_of(data, lm_teacher.Tokens(language_model))
        for number, recipe in enumerate(plan.language_models):
            progress(f"teacher {len(said) + 1}, a language model")
            unread = fold_of(data, number, len(plan.language_models) if plan.folds else 1)
            own = chats.hold_out(unread)
            net = language_teacher(own, language_model, recipe, edges, device, progress)
            said.append(_said(net, chats, unread, number < plan.matched, device))
    probabilities = [each.probabilities for each in said]
    together = ensemble.fit(probabilities, data, edges, device)
    progress(f"teachers' shares, by group of models: {together.shares()}")
    unread_by = [each.unread for each in said]
    target = ensemble.targets(together, probabilities, data, unread_by, plan.unread_share)
    reads = [each.read for each in said if each.read is not None]
    return Lessons(train_loop.Taught(target, np.concatenate(reads, axis=1)), first)


def chats_of(data: TrainingArrays, tokens: lm_teacher.Tokens) -> TrainingArrays:
    """The same in a language model's tokens: prompts as turns of a chat, and the answers' beginnings."""
    answers = data.answers
    if answers is not None:
        answers = answers._replace(prefix=tokens.whole(answers.texts, lm_teacher.ANSWER_TOKENS))
    return replace(data, pieces=tokens.chats(data.texts), vocabulary=(), answers=answers)


def fold_of(data: TrainingArrays, number: int, folds: int) -> NDArray[np.bool_]:
    """Which prompts are of one of so many folds, by chance; of a single fold none are."""
    drawn = np.random.default_rng(FOLD_SEED).integers(0, 1 << 30, len(data.pieces))
    unread: NDArray[np.bool_] = (drawn % folds == number) & (folds > 1)
    return unread


def encoder_teacher(  # noqa: PLR0917 - each is of another type
    data: TrainingArrays,
    encoder: str,
    recipe: train_loop.Recipe,
    masked: auxiliary_tasks.Masked,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> networks.LengthNet:
    """An encoder that reads masked prompts and answers, where there are any, and then learns lengths."""
    torch.manual_seed(recipe.seed)
    body, beside = networks.Teacher(encoder), None
    if data.answers is not None:
        loss = auxiliary_tasks.read_masked(body.encoder, data, data.answers, masked, device)
        progress(f"masked pieces: loss {loss:.3f}")
        beside = auxiliary_tasks.AnswerTask(data.answers, body.width, len(data.models), len(data.vocabulary))
    net, rows = with_head(body, data, edges), data.rows(TRAIN)
    return train_loop.fit(net, data, rows, edges, recipe, beside=beside, device=device, progress=progress)


def language_teacher(  # noqa: PLR0917 - each is of another type
    chats: TrainingArrays,
    language_model: str,
    recipe: train_loop.Recipe,
    edges: tuple[int, ...],
    device: str,
    progress: Progress,
) -> networks.LengthNet:
    """A language model that learns lengths and, where there are answers, how these begin."""
    torch.manual_seed(recipe.seed)
    body, beside = lm_teacher.Reader(language_model), None
    if chats.answers is not None:
        beside = lm_teacher.AnswerBeginnings(chats.answers, body, len(chats.models))
    net, rows = with_head(body, chats, edges), chats.rows(TRAIN)
    return train_loop.fit(net, chats, rows, edges, recipe, beside=beside, device=device, progress=progress)


def with_head(body: nn.Module, data: TrainingArrays, edges: tuple[int, ...]) -> networks.LengthNet:
    """A net with a new head, which sees lexical scores as the training prompts have them."""
    seen = torch.tensor(data.side[np.unique(data.prompt[data.rows(TRAIN)])])
    config = length_head.HeadConfig(hidden=HEAD_HIDDEN)
    return networks.LengthNet(body, config, seen, len(data.models), len(edges) - 1)


def _said(
    net: networks.LengthNet, data: TrainingArrays, unread: NDArray[np.bool_], matched: bool, device: str
) -> Said:
    logits = train_loop.logits_of(net, data, np.arange(len(data.prompt)), device=device)
    probabilities = torch.softmax(torch.tensor(logits), 1).half().numpy()
    if not matched:
        return Said(probabilities, None, unread)
    inputs, _ = train_loop.inputs_of(net, data, np.arange(len(data.pieces)), device=device)
    read = inputs[:, : net.body.width]
    standard = ((read - read.mean(axis=0)) / (read.std(axis=0) + 1e-6)).astype(np.float16)
    return Said(probabilities, standard, unread)
