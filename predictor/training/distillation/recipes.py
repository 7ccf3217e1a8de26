"""The recipes of the kinds that are distilled from an encoder, and from a language model where one is given.

Values alone; `predictor/training/train.py` follows them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from predictor.training import auxiliary_tasks, length_head, networks, train_loop
from predictor.training.distillation import synthetic_prompts

ENCODER = train_loop.Recipe(
    epochs=4,
    batch_prompts=160,
    body_rate=1.2e-4,
    head_rate=2e-3,
    rows_per_prompt=12,
    averaged=0.995,
    seed=21,
)
LANGUAGE_MODEL = train_loop.Recipe(
    epochs=3,
    batch_prompts=128,
    body_rate=1e-4,
    head_rate=2e-3,
    rows_per_prompt=12,
    averaged=0.995,
    beside=1.0,
)
STUDENT = train_loop.Recipe(
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
MASKED = auxiliary_tasks.Masked()
ASKING = synthetic_prompts.Asking()
MODELS = length_head.HeadConfig(epochs=2, learning_rate=5e-4, input_noise=0.1, hidden_dropout=0.2)
KEPT = networks.TrimmedConfig()
LARGE = networks.TrimmedConfig((networks.LayerConfig(12, 1280),) * 6)


@dataclass(frozen=True, slots=True)
class Plan:
    """How an encoder is distilled: teachers, the student taught by them all, then its head on many models."""

    encoders: tuple[train_loop.Recipe, ...] = (ENCODER, replace(ENCODER, rows_per_prompt=10, seed=22))
    language_models: tuple[train_loop.Recipe, ...] = ()
    folds: bool = False
    """Whether each teacher of a kind leaves out its own fold of the training prompts."""
    unread_share: float = 0.7
    """Of what a training prompt's rows are told to be: by those that never read it; the rest is by all."""
    matched: int = 2
    """What so many teachers of each kind read, the student is to guess."""
    student: train_loop.Recipe = STUDENT
    masked: auxiliary_tasks.Masked = MASKED
    models: length_head.HeadConfig = MODELS
    kept: networks.TrimmedConfig = KEPT
    kept_pieces: int = 16_000
    """So many of the vocabulary's pieces, the commonest."""
    mixed_prompts: int = 250_000
    asked_prompts: int = 0
    asking: synthetic_prompts.Asking = ASKING
    seed: int = 5


PLANS = {
    "small": Plan(),
    "large": Plan(student=replace(STUDENT, epochs=8, body_rate=1.2e-4, moved_share=0.0), kept=LARGE),
}
_WITH_LANGUAGE = Plan(
    encoders=tuple(replace(ENCODER, rows_per_prompt=(12, 10)[i % 2], seed=21 + i) for i in range(4)),
    language_models=tuple(replace(LANGUAGE_MODEL, body_rate=(1e-4, 1.5e-4)[i % 2], seed=i) for i in range(8)),
    folds=True,
    matched=1,
    student=replace(STUDENT, epochs=51, teacher_share=0.9, visits=2),
    mixed_prompts=60_000,
    asked_prompts=280_000,
)
LANGUAGE_PLANS = {
    "small": _WITH_LANGUAGE,
    "large": replace(
        _WITH_LANGUAGE,
        student=replace(_WITH_LANGUAGE.student, epochs=26, body_rate=2.5e-4, moved_share=0.0, seed=4),
        kept=LARGE,
    ),
}
"""What the kinds follow where a language model is given, too."""
