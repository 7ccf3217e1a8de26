"""Messages owed to one gateway replica, and when they are due. Pure bookkeeping; the caller passes the time.

Deltas of a choice are merged into one until they are taken, so a slow reader costs no more than its attempts
can produce. First tokens and finishes are due at once, for their choices alone; other deltas when the event
loop has time for another send (`wire/send_pace.py`), load figures every 50 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from site_engine.core.request import merge_tool_calls
from site_engine.core.training import Training
from site_engine.messages import (
    Accepted,
    Bid,
    Delta,
    FromSite,
    Load,
    Models,
    Ordered,
    Prefixes,
    Rejected,
    Released,
    Step,
)
from wire.send_pace import SendPace

STREAM_INTERVAL_S = 0.02
"""Default of the longest that deltas wait to be sent together."""
LOAD_INTERVAL_S = 0.05
PREFIXES_INTERVAL_S = 1.0
MODELS_INTERVAL_S = 0.5
"""Each message has all of them, and a site that starts may load hundreds, one after the other. The answer to
an order does not wait, nor come before the models that it has changed.
"""
MAX_PREFIXES = 60
"""Of one message: 16 bytes each, 1 KB in all."""
MAX_PARTS = 64
MAX_ANSWERS = 4096
"""Unread answers at which the link stops reading until the gateway does."""
_ABOUT_ATTEMPTS = (Accepted, Rejected, Released)


class Outbox:
    """The models leave first; then answers in the order they were put; then one Step with the deltas due;
    then load, bid and the newest report of each run of training.
    """

    def __init__(self, stream_interval_s: float = STREAM_INTERVAL_S) -> None:
        self._answers: deque[FromSite] = deque()
        self._deltas: dict[tuple[str, int], list[Delta]] = {}
        self._urgent: set[tuple[str, int]] = set()  # choices whose deltas are due at once
        self._pace = SendPace(stream_interval_s)
        self._models: Models | None = None
        self._models_s = float("-inf")
        self._load: Load | None = None
        self._load_s = float("-inf")
        self._bid: Bid | None = None
        self._prefixes: dict[bytes, None] = {}  # the newest last
        self._prefixes_s = float("-inf")
        self._training: dict[str, Training] = {}  # by run

    @property
    def full(self) -> bool:
        return len(self._answers) >= MAX_ANSWERS

    def put(self, message: FromSite) -> None:
        self._answers.append(message)

    def delta(self, delta: Delta, *, urgent: bool) -> None:
        choice = delta.attempt_id, delta.choice
        parts = self._deltas.setdefault(choice, [])
        parts.append(delta)
        if len(parts) >= MAX_PARTS:
            parts[:] = [_merged(parts)]
        if urgent:
            self._urgent.add(choice)

    def models(self, models: Models) -> None:
        """The latest models replace those not yet sent."""
        self._models = models

    def load(self, load: Load) -> None:
        self._load = load

    def drop_load(self) -> bool:
        """Drop the load report that waits to be sent; return False if none does."""
        load, self._load = self._load, None
        return load is not None

    def bid(self, bid: Bid | None) -> None:
        """The latest bid replaces one not yet sent; None withdraws it."""
        self._bid = bid

    def prefixes(self, hashes: Iterable[bytes]) -> None:
        """Add prompts; the oldest of too many are dropped."""
        for each in hashes:
            self._prefixes.pop(each, None)
            self._prefixes[each] = None
        while len(self._prefixes) > MAX_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]

    def training(self, report: Training) -> None:
        """The latest report of a run replaces one not yet sent."""
        self._training[report.run] = report

    def attempt_ids(self) -> Iterator[str]:
        """Return the attempts with deltas not yet taken."""
        return (attempt_id for attempt_id, _ in self._deltas)

    def stream_lost(self) -> None:
        """Keep messages about attempts; drop those about the stream that is gone."""
        self._answers = deque(each for each in self._answers if isinstance(each, _ABOUT_ATTEMPTS))
        self._models = self._load = self._bid = None
        self._prefixes.clear()
        self._training.clear()

    def take(self, now: float, busy_s: float = 0.0) -> list[FromSite]:
        """Return everything that is due now, in the order in which it must be written.

        `busy_s`: the CPU seconds of the event loop's thread so far.
        """
        taken: list[FromSite] = []
        ordered = any(isinstance(each, Ordered) for each in self._answers)
        if self._models is not None and (ordered or now >= self._models_s + MODELS_INTERVAL_S):
            taken.append(self._models)
            self._models = None
            self._models_s = now
        taken += self._answers
        self._answers.clear()
        if self._deltas and now >= self._pace.due_s:
            taken.append(Step(tuple(_merged(parts) for parts in self._deltas.values())))
            self._deltas.clear()
            self._pace.sent(now, busy_s)
        elif self._urgent:
            taken.append(Step(tuple(_merged(self._deltas.pop(choice)) for choice in self._urgent)))
        self._urgent.clear()
        if self._load is not None and now >= self._load_s + LOAD_INTERVAL_S:
            taken.append(self._load)
            self._load = None
            self._load_s = now
        if self._bid is not None:
            taken.append(self._bid)
            self._bid = None
        if self._prefixes and now >= self._prefixes_s + PREFIXES_INTERVAL_S:
            taken.append(Prefixes(b"".join(self._prefixes)))
            self._prefixes.clear()
            self._prefixes_s = now
        taken += self._training.values()
        self._training.clear()
        return taken

    def due_s(self) -> float | None:
        """Return the time at which something is due; None if nothing is owed."""
        if self._answers or self._bid is not None or self._urgent or self._training:
            return float("-inf")
        moments = []
        if self._deltas:
            moments.append(self._pace.due_s)
        if self._models is not None:
            moments.append(self._models_s + MODELS_INTERVAL_S)
        if self._load is not None:
            moments.append(self._load_s + LOAD_INTERVAL_S)
        if self._prefixes:
            moments.append(self._prefixes_s + PREFIXES_INTERVAL_S)
        return min(moments, default=None)


def _merged(parts: Sequence[Delta]) -> Delta:
    """Merge the parts of one choice into one delta, in their order."""
    if len(parts) == 1:
        return parts[0]
    return parts[-1]._replace(
        text="".join(part.text for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        refusal="".join(part.refusal for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        prompt_logprobs=tuple(chain.from_iterable(part.prompt_logprobs for part in parts)),
        pooled=tuple(chain.from_iterable(part.pooled for part in parts)),
        tool_calls=merge_tool_calls(chain.from_iterable(part.tool_calls for part in parts)),
    )
