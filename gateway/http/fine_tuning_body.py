"""Reads the body of a new fine-tuning job.

Refuses unknown fields, so that no job is trained differently from what was requested.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from gateway.domain import Caller
from gateway.http.batches import read_metadata
from gateway.openai.fields import UNSUPPORTED, Fields, Problems, echo
from gateway.tuning.ledger import new_job_id
from gateway.tuning.values import Job, Plan, Target

MAX_EPOCHS: Final = 50
MAX_BATCH: Final = 256
MAX_RANK: Final = 256
MAX_SEED: Final = 2**31 - 1
MAX_SUFFIX_CHARS: Final = 64
MAX_NAME_CHARS: Final = 200
"""Maximum length of a tuned model's name: sites announce no longer names."""
_SUFFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AUTO: Final = "auto"
_DEFAULT: Final = Plan()


def read_job(body: dict[str, object], caller: Caller, now: float) -> Job:
    """Read the body of a new job. Raises BadRequest."""
    problems = Problems()
    fields = Fields(body, problems)
    model = fields.required_text("model")
    training_file = fields.required_text("training_file")
    validation_file = fields.text("validation_file") or None
    suffix = _suffix(fields)
    seed = fields.integer("seed", 0, MAX_SEED, None)
    metadata = read_metadata(fields)
    if fields.items("integrations"):
        fields.refuse("integrations", "are not there: no job reports to another service", UNSUPPORTED)
    hyperparameters = _hyperparameters(fields)
    plan = _plan(hyperparameters, fields.child("mico"), seed)
    _refuse_unknown(fields)
    problems.raise_any()
    job = Job(
        id=new_job_id(),
        tenant=caller.tenant,
        key_id=caller.key_id,
        model=model,
        training_file_id=training_file,
        created_at=now,
        plan=plan,
        suffix=suffix,
        validation_file_id=validation_file,
        about=metadata,
    )
    if len(job.tuned_model) > MAX_NAME_CHARS:
        fields.refuse("suffix", f"makes a name longer than {MAX_NAME_CHARS} characters")
        problems.raise_any()
    return job


def _suffix(fields: Fields) -> str:
    suffix = fields.text("suffix")
    if suffix and (len(suffix) > MAX_SUFFIX_CHARS or not _SUFFIX.fullmatch(suffix)):
        fields.refuse(
            "suffix", f"is up to {MAX_SUFFIX_CHARS} letters, digits, '.', '_' and '-', got {echo(suffix)}"
        )
    return suffix


def _hyperparameters(fields: Fields) -> Fields | None:
    """Return the hyperparameters of `method`, or the older top-level ones. Both at once are refused."""
    top, method = fields.child("hyperparameters"), fields.child("method")
    if method is None:
        return top
    kind = method.required_text("type")
    if kind and kind != "supervised":
        method.refuse("type", f"can only be 'supervised', got {echo(kind)}", UNSUPPORTED)
    supervised = method.child("supervised")
    inner = None if supervised is None else supervised.child("hyperparameters")
    for name in ("dpo", "reinforcement"):
        if method.raw(name) is not None:
            method.refuse(name, "is no method here", UNSUPPORTED)
    if top is not None and inner is not None:
        fields.refuse("hyperparameters", "stand in 'method' already")
    _refuse_unknown(method)
    if supervised is not None:
        _refuse_unknown(supervised)
    return inner if inner is not None else top


def _plan(hyperparameters: Fields | None, more: Fields | None, seed: int | None) -> Plan:
    given = hyperparameters if hyperparameters is not None else Fields({}, Problems())
    extra = more if more is not None else Fields({}, Problems())
    rank = extra.integer("rank", 1, MAX_RANK, _DEFAULT.rank)
    target = extra.text("target") or _DEFAULT.target.value
    if target not in tuple(Target):
        extra.refuse("target", f"is one of {', '.join(Target)}, got {echo(target)}")
        target = _DEFAULT.target.value
    epochs, batch, multiplier = "n_epochs", "batch_size", "learning_rate_multiplier"
    plan = Plan(
        epochs=_DEFAULT.epochs
        if given.raw(epochs) == _AUTO
        else given.integer(epochs, 1, MAX_EPOCHS, _DEFAULT.epochs),
        batch_size=_DEFAULT.batch_size
        if given.raw(batch) == _AUTO
        else given.integer(batch, 1, MAX_BATCH, _DEFAULT.batch_size),
        learning_rate_multiplier=1.0
        if given.raw(multiplier) == _AUTO
        else given.number(multiplier, 1e-3, 1e3, 1.0),
        rank=rank,
        alpha=extra.number("alpha", 1e-3, 1e4, 2.0 * rank),
        target=Target(target),
        seed=secrets.randbelow(MAX_SEED) if seed is None else seed,
    )
    _refuse_unknown(given)
    _refuse_unknown(extra)
    return plan


def _refuse_unknown(fields: Fields) -> None:
    for name in fields.unread():
        fields.refuse(name[:100], "is not known here", UNSUPPORTED)
