"""The one interface through which a site uses an engine, and the values that cross it.

Does not know which engine stands behind it: `native.py` and `remote/engine.py` implement it.
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
"""The choices of one attempt: admitted together, released together."""


class Delivered(NamedTuple):
    """The part of a resumed answer that the client has; `argument_chars` are those of the last call begun."""

    chars: int = 0
    calls: int = 0
    argument_chars: int = 0
    reasoning_chars: int = 0


class ParsedText(NamedTuple):
    """Text of an answer without its calls of functions and its reasoning, the calls, and the reasoning."""

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""


class ToolParser(Protocol):
    """Separates calls of functions from the text of one choice while it grows."""

    @property
    def calls(self) -> int:
        """Number of calls begun."""
        ...

    def feed(self, text: str) -> ParsedText: ...
    def end(self) -> ParsedText: ...


class ToolCalling(Protocol):
    """The style in which the model of one attempt writes calls of functions."""

    def parser(self, choice: str, delivered: Delivered) -> ToolParser:
        """Return a parser for one choice. `choice` names it everywhere: ids of calls are made of it."""
        ...


class Prepared(NamedTuple):
    """A prompt ready for the engine, and the text that an echoing answer begins with. `shown`: special tokens
    that the text of the answer shows, with their names.

    `resumed`: the tokens that an answer begun elsewhere goes on from. `chain`: as in `Request`.
    `payload` belongs to the engine that prepared the prompt: the site hands it back to `submit` and never
    looks into it.
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
    """The facts that a site announces of its model and engine.

    `weights_bytes`, and `slots_bytes` of the slots for adapters, are on each device; 0: unknown.
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
    """The engine's figures and the moment, on the site's clock, at which they were true."""

    figures: LoadFigures
    at_s: float


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of an engine, called on the event loop. `broken` is called once, with the reason.

    `training` gets what happens to a job, by its id, until `Failed` or the last `Saved`. `refused` gets
    the id of a variant that is served no more, as an engine that started again could not load it, and why.
    """

    outputs: Callable[[Sequence[Output]], None]
    load: Callable[[LoadSeen], None]
    broken: Callable[[str], None]
    training: Callable[[str, TrainingEvent], None] = lambda job_id, event: None
    refused: Callable[[str, VariantRefused], None] = lambda variant_id, refused: None


class TrainingEngine(Protocol):
    """Trains adapters in an engine. Events of jobs go to `Listener.training`."""

    def train(self, order: TrainingOrder, reply: Callable[[TrainingRefused | None], None]) -> None:
        """Begin a job, read beside what is served; reply None, or why it is not trained here."""
        ...

    def stop_training(self, job_id: str, reply: Callable[[Saved | Failed | None], None]) -> None:
        """End a job without an event; reply with its state after its last step, why it can't be had, or None
        if the job is not here.
        """
        ...


class EngineClient(Protocol):
    """An engine as a site uses it, from the event loop. No method blocks; replies are called on the loop."""

    @property
    def waiting(self) -> int:
        """Number of prompts that wait to be prepared, and of those given up that were not dropped yet."""
        ...

    def waiting_of(self, tenant: str) -> int:
        """Return the number of prompts of `tenant` that wait to be prepared."""
        ...

    def stalled_s(self) -> float:
        """Return how long the engine has been without progress if its work does not explain it, else 0.

        Called a few times a second.
        """
        ...

    def prepare(
        self,
        assign: Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Make the prompt of an attempt ready for `submit`, or refuse it.

        `is_wanted` may be called on any thread; once it is false there need be no reply.
        """
        ...

    def count(
        self,
        assign: Assign,
        reply: Callable[[int | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Count the tokens of a prompt, or refuse to; `is_wanted` as in `prepare`."""
        ...

    def submit(self, prepared: Prepared, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        """Admit all requests of an attempt or none; reply with the refusal, None if they are admitted. Each
        admitted request ends with exactly one finish.

        Until the first output of an admitted attempt, `reply` may be called again with a refusal, which ends
        all of its requests: a server may take an attempt late, or not at all.
        """
        ...

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End requests, with a CANCELLED finish each. Requests that have ended are ignored."""
        ...

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        """Give up groups of which nothing has started; reply, group by group, whether it was given up."""
        ...

    def request_load(self) -> None:
        """Have the load reported to the listener soon."""
        ...
