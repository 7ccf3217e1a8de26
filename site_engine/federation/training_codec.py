"""Convert the messages of training, and orders for models, as `codec.py` does the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from site_engine.core.training import Content, StopTraining, Train, Training, Trains
from site_engine.messages import ModelOrder
from wire import federation_pb2 as pb


def decode_train(body: pb.Train) -> Train:
    return Train(
        job_id=body.job_id,
        run=body.run,
        tenant=body.tenant,
        model=body.model,
        tuned_model=body.tuned_model,
        data=Content(body.data.sha256, body.data.bytes),
        validation=_content(body, "validation"),
        snapshot=_content(body, "snapshot"),
        epochs=body.epochs,
        batch_size=body.batch_size,
        learning_rate=body.learning_rate,
        rank=body.rank,
        alpha=body.alpha,
        target=body.target,
        seed=body.seed,
        revision=body.revision,
    )


def decode_order(body: pb.ModelOrder) -> ModelOrder:
    content = _content(body, "content")
    own = body.order_id, body.kind, body.model, body.adapter, body.folder
    return ModelOrder(*own, content, body.tenant, body.parent)


def _content(body: Any, name: str) -> Content | None:
    found = getattr(body, name)
    return Content(found.sha256, found.bytes) if body.HasField(name) else None


def encode_trains(trains: Trains | None) -> pb.Trains | None:
    if trains is None:
        return None
    return pb.Trains(runs=trains.runs, max_rank=trains.max_rank, usd_per_mtok=trains.usd_per_mtok)


def encode_training(report: Training) -> pb.Training:
    return pb.Training(
        job_id=report.job_id,
        run=report.run,
        step=report.step,
        total_steps=report.total_steps,
        trained_tokens=report.trained_tokens,
        steps=[
            pb.TrainingStep(
                step=each.step, loss=each.loss, accuracy=each.accuracy, validation_loss=each.valid_loss
            )
            for each in report.steps
        ],
        tokens_per_s=report.tokens_per_s,
        end=pb.Training.End.ValueType(report.end),
        error_code=report.error_code,
        error=report.error,
        revision=report.revision,
    )


DECODERS: dict[str, Callable[[Any], ModelOrder | Train | StopTraining]] = {
    "order": decode_order,
    "train": decode_train,
    "stop_training": lambda body: StopTraining(body.run, body.snapshot),
}
