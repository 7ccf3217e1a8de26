"""The interface through which a site uses an engine, and the values passed through it.

Implemented by `native.py`, the engine of this project, and `remote/engine.py`, any inference server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from site_engine.core.load import LoadFigures
from site_engine.core.request import Grammar, Output, Request, Thinking, ToolCall
from site_engine.core.training import Failed, Saved, TrainingEvent, TrainingOrder
from site_engine.errors import NotServed, TrainingRefused, VariantRefused
from site_engine.messages import Assign

Group: TypeAlias = Sequence[Request]
"""The choices of one attempt, which are admitted and released together."""


class Delivered(NamedTuple):
    """The part of a resumed answer that the client has received. `argument_chars` counts those of the last
    call.
    """

    chars: int = 0
    calls: int = 0
    argument_chars: int = 0
    reasoning_chars: int = 0


class ParsedText(NamedTuple):
    """The text of an answer without tool calls and reasoning, the tool calls, and the reasoning."""

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""


class ToolParser(Protocol):
    """Separates tool calls from the text of one choice as the text arrives."""

    @property
    def calls(self) -> int:
        """Number of calls started."""
        ...

    def feed(self, text: str) -> ParsedText: ...
    def end(self) -> ParsedText: ...


class ToolCalling(Protocol):
    """The format in which the model of one attempt writes tool calls."""

    def parser(self, choice: str, delivered: Delivered) -> ToolParser:
        """Return a parser for one choice. Ids of calls are derived from `choice`, its unique name."""
        ...


class Prepared(NamedTuple):
    """A prompt that is ready for the engine, and the text that an echoing answer begins with.

    `resumed`: the tokens after which an answer started elsewhere continues. `chain`: as in `Request`.
    `shown`: special tokens that the answer's text shows, with their names. `payload` is private to the engine
    that prepared the prompt: the site passes it back to `submit` unread.
    """

    token_ids: tuple[int, ...]
    echo: str
    guessed_tokens: int = 0  # length of a prompt that only the engine behind a server can tokenize
    grammar: Grammar | None = None
    tool_calling: ToolCalling | None = None
    thinking: Thinking | None = None
    shown: Mapping[int, str] = MappingProxyType({})
    resumed: tuple[int, ...] = ()
    chain: str = ""
    payload: object = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids) or self.guessed_tokens


class Facts(NamedTuple):
    """The facts that a site announces about its model and engine.

    `weights_bytes`, and `slots_bytes` of adapter slots, are per device; 0: unknown.
    """

    name: str
    revision: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    slots: int
    kv_tokens: int
    weights_bytes: int = 0
    slots_bytes: int = 0


class LoadSeen(NamedTuple):
    """The engine's load figures and the time at which they were taken, on the site's clock."""

    figures: LoadFigures
    at_s: float


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of an engine, called on the event loop. `broken` is called once, with the reason.

    `training` receives the events of a job, by its id, until `Failed` or the last `Saved`. `refused` receives
    the id of a variant that a restarted engine could not load, which is no longer served, and the reason.
    """

    outputs: Callable[[Sequence[Output]], None]
    load: Callable[[LoadSeen], None]
    broken: Callable[[str], None]
    training: Callable[[str, TrainingEvent], None] = lambda job_id, event: None
    refused: Callable[[str, VariantRefused], None] = lambda variant_id, refused: None


class TrainingEngine(Protocol):
    """Trains adapters in an engine. Events of jobs go to `Listener.training`."""

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        """Start a job, whose data is read while the engine serves. Calls `reply` with None, or the reason of
        a refusal.
        """
        ...

    def stop_training(self, job_id: str, reply: Callable[[Saved | Failed | None], None]) -> None:
        """End a job without an event. Calls `reply` with its state after the last step, or the reason why
        there is none, or None if the job is unknown.
        """
        ...


class EngineClient(Protocol):
    """An engine as a site uses it. Methods and replies are called on the event loop; no method blocks."""

    @property
    def waiting(self) -> int:
        """Number of prompts waiting to be prepared, including abandoned ones that are not dropped yet."""
        ...

    def waiting_of(self, tenant: str) -> int:
        """Return the number of prompts of `tenant` waiting to be prepared."""
        ...

    def stalled_s(self) -> float:
        """Return the seconds without progress that the engine's work does not explain, else 0.

        Called a few times a second.
        """
        ...

    def prepare(
        self,
        assign: Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare the prompt of an attempt for `submit`, or refuse it.

        `is_wanted` may be called on any thread. Once it returns False, no reply is needed.
        """
        ...

    def count(
        self,
        assign: Assign,
        reply: Callable[[int | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Count the tokens of a prompt, or refuse it. `is_wanted` as in `prepare`."""
        ...

    def submit(self, prepared: Prepared, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        """Admit all requests of an attempt or none. Calls `reply` with the refusal, or None if admitted. Each
        admitted request ends with exactly one finish.

        Until the first output of an admitted attempt `reply` may be called again with a refusal, which ends
        all of its requests: a server may accept an attempt late, or not at all.
        """
        ...

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel requests; each ends with a CANCELLED finish. Requests that have ended are ignored."""
        ...

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Release the groups of which no request has started. Calls `reply` with one bool for each group."""
        ...

    def request_load(self) -> None:
        """Request a load report to the listener."""
        ...
