"""Training runs at one site: the orders to the site, and its newest report of each run."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Final, NamedTuple

from gateway.federation import codec
from gateway.federation.outbox import Outbox
from gateway.trains import Trains
from wire import federation_pb2 as pb

MAX_RUNS: Final = 64
"""The number of runs whose reports are kept per site; the run reported least recently is dropped."""
MAX_STEPS: Final = 64
MAX_USD_PER_MTOK: Final = 1e6
MAX_TOTAL_STEPS: Final = 10**7
MAX_TRAINED_TOKENS: Final = 10**13


class TrainedStep(NamedTuple):
    step: int
    loss: float
    accuracy: float
    validation_loss: float | None


class RunReport(NamedTuple):
    """The newest report of a run. `end` is RUNNING until the run has ended. `heard_s`: the time of the report
    on the gateway's monotonic clock.
    """

    job_id: str
    run: str
    step: int
    total_steps: int
    trained_tokens: int
    steps: tuple[TrainedStep, ...]
    tokens_per_s: float
    end: pb.Training.End
    error_code: str
    error: str
    revision: str
    heard_s: float


class TrainingRuns:
    """The training runs of one site. `reports`: the newest report of each run, by run name."""

    def __init__(self, outbox: Outbox, clock: Callable[[], float]) -> None:
        self.reports: dict[str, RunReport] = {}
        self._outbox = outbox
        self._clock = clock

    def train(self, order: pb.Train) -> None:
        """Order a run. Ordering it again is harmless: a site that has the run continues it."""
        self._outbox.withdraw(_key(order.run))
        self._outbox.put(pb.GatewayMessage(train=order), _key(order.run))

    def stop(self, run: str, *, snapshot: bool) -> None:
        """Order the end of a run, with a snapshot, or without one: then its report is dropped, too."""
        self._outbox.withdraw(_key(run))
        self._outbox.put(pb.GatewayMessage(stop_training=pb.StopTraining(run=run, snapshot=snapshot)))
        if not snapshot:
            self.reports.pop(run, None)

    def reported(self, message: pb.Training) -> None:
        self.reports.pop(message.run, None)
        self.reports[message.run] = _report(message, self._clock())
        while len(self.reports) > MAX_RUNS:
            del self.reports[next(iter(self.reports))]


def trains_of(hello: pb.Hello) -> Trains | None:
    """Return the training abilities in a site's Hello, None if it does not train. Raises ProtocolError."""
    if not hello.HasField("trains"):
        return None
    price = hello.trains.usd_per_mtok
    if not 0 <= price <= MAX_USD_PER_MTOK:  # false for NaN, too
        raise codec.ProtocolError(f"a price of {price} dollars for a million trained tokens")
    return Trains(max(1, hello.trains.runs), hello.trains.max_rank, price)


def _key(run: str) -> str:
    return f"train {run}"


def _report(message: pb.Training, now_s: float) -> RunReport:
    """Convert a report. Raises ProtocolError for figures above the limits."""
    if message.total_steps > MAX_TOTAL_STEPS or message.trained_tokens > MAX_TRAINED_TOKENS:
        raise codec.ProtocolError(f"{message.total_steps} steps of {message.trained_tokens} tokens")
    figures = (_step(each) for each in message.steps[-MAX_STEPS:])
    return RunReport(
        message.job_id,
        message.run,
        message.step,
        message.total_steps,
        message.trained_tokens,
        tuple(each for each in figures if isfinite(each.loss) and isfinite(each.accuracy)),
        message.tokens_per_s if isfinite(message.tokens_per_s) else 0.0,
        message.end,
        _word(message.error_code),
        codec.reason(message.error),
        _word(message.revision),
        now_s,
    )


def _word(text: str) -> str:
    return "".join(filter(str.isprintable, text[: codec.MAX_NAME]))


def _step(message: pb.TrainingStep) -> TrainedStep:
    known = message.HasField("validation_loss") and isfinite(message.validation_loss)
    return TrainedStep(
        message.step, message.loss, message.accuracy, message.validation_loss if known else None
    )
