"""Messages of the federation link as frozen values: the site's side of wire/federation.proto.

Does not know protobuf; `federation/codec.py` converts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, TypeAlias

from site_engine.core.chain import Block
from site_engine.core.load import LoadFigures
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Output, Pooled, Sampling, Timings, TokenLogprob, ToolCall
from site_engine.core.training import Content, StopTraining, Train, Training, Trains
from site_engine.errors import Reason

# ---- from a gateway


@dataclass(frozen=True, slots=True)
class Welcome:
    gateway: str
    peers: tuple[str, ...]
    heartbeat_s: float
    grace_s: float
    cancel: tuple[str, ...]
    reads_bunches: bool = False
    protocol: int = 1  # the highest that both ends speak
    reads_prefixes: bool = False
    reads_models: bool = False
    worker_ports: tuple[int, ...] = ()
    reads_held: bool = False
    tunes: bool = False  # reads Training, and keeps a tenant's models to that tenant


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`content` is text. `parts`: OpenAI's content parts where there are images among them, else empty."""

    role: str
    content: str
    name: str = ""
    tool_calls_json: str = ""
    tool_call_id: str = ""
    reasoning: str = ""  # of an earlier answer
    parts: Sequence[Any] = ()


class ToolChoice(StrEnum):
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions a model may call, as OpenAI's tools array has them. `name` is the one it must call."""

    offered: tuple[Mapping[str, Any], ...]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    single: bool = False

    @property
    def functions(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the parameters of the functions offered, by name."""
        functions = (each["function"] for each in self.offered)
        return {str(each["name"]): each.get("parameters") or {} for each in functions}

    @property
    def forced(self) -> bool:
        return self.choice is not ToolChoice.AUTO

    @property
    def strict(self) -> bool:
        return any(each["function"].get("strict") for each in self.offered)

    @property
    def callable(self) -> tuple[Mapping[str, Any], ...]:
        functions = (each["function"] for each in self.offered)
        return tuple(each for each in functions if not self.name or each["name"] == self.name)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`template_kwargs` are a client's own; `reasoning_effort` is one of OpenAI's, or empty."""

    messages: tuple[ChatMessage, ...]
    tools: Tools | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str = ""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """`inputs` texts to embed or documents to rank, as `task` says; `body` is the request without the model.

    `tokens` is the gateway's guess.
    """

    task: str
    body: Mapping[str, Any]
    inputs: int
    tokens: int


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt | PoolingPrompt


@dataclass(frozen=True, slots=True)
class Assign:
    """One attempt. `deadline_s` counts from its arrival; None means no deadline.

    `resumed`: the tokens of an answer begun elsewhere, empty where they are unknown. Then it goes on after
    `resumed_text`, which is all that the client has, and `resumed_tokens` is the count so far.

    `guided_json`: the JSON schema that the answer must satisfy, empty if there is none.

    `image_tokens`: the gateway's guess for the images of the prompt. `prefix_hashes`: by which gateways know
    the prompt. `any_order`: of a line of a batch, which others of its tenant may overtake; `prefill_heavy`:
    it takes computing rather than memory.
    """

    attempt_id: str
    query_id: str
    model: str
    prompt: Prompt
    sampling: Sampling
    choices: int
    echo: bool
    remaining: RemainingCurve
    lane: Lane
    priority: int
    deadline_s: float | None
    tenant: str
    resumed: tuple[int, ...] = ()
    resumed_chars: int = 0
    resumed_text: str = ""
    resumed_tokens: int = 0
    resumed_calls: int = 0  # calls of functions begun, and the characters of the last one's arguments
    resumed_argument_chars: int = 0
    resumed_reasoning_chars: int | None = None  # beside `resumed_chars`; None: the gateway does not say
    guided_json: str = ""
    request_id: str = ""  # the id that the client knows
    traceparent: str = ""
    image_tokens: int = 0
    prefix_hashes: bytes = b""
    any_order: bool = False
    prefill_heavy: bool = False

    @property
    def tools(self) -> Tools | None:
        """The functions that the model may call; None where the client offers none."""
        return self.prompt.tools if isinstance(self.prompt, ChatPrompt) else None

    @property
    def by_text(self) -> bool:
        """True if the answer goes on after a text whose tokens are unknown."""
        return bool(self.resumed_text) and not self.resumed


@dataclass(frozen=True, slots=True)
class Count:
    """A prompt whose tokens are to be counted; `assign.attempt_id` names the count."""

    assign: Assign


@dataclass(frozen=True, slots=True)
class Cancel:
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Release:
    release_id: str
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """`kind` is "add", "remove", "sleep" or "wake"; to add, `adapter` or `folder` is a folder here, or
    `content` an adapter of `parent` that the site fetches, for a tenant alone.
    """

    order_id: str
    kind: str
    model: str
    adapter: str = ""
    folder: str = ""
    content: Content | None = None
    tenant: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int


class ReportPace(NamedTuple):
    times_off: int = 1
    every_s: int = 1
    heartbeat_s: float = 0.0


# ---- from the site


class ModelState(IntEnum):
    """Numbers as on the wire. A sleeping model has no memory of its own; an attempt for it wakes it."""

    READY = 0
    SLEEPING = 1
    WAKING = 2


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    revision: str
    context_tokens: int
    created_s: int
    features: tuple[str, ...]
    max_token_chars: int = 0  # 0: unknown
    parent: str = ""  # the model of which this is a variant
    own_bytes: int = 0  # that it needs beside its parent
    state: ModelState = ModelState.READY
    wake_s: float = 0.0  # that waking takes, 0: unknown
    tenant: str = ""  # whose model it is alone
    blocks: tuple[
        Block, ...
    ] = ()  # in memory here: of a base all, of a variant what it has beside its parent


@dataclass(frozen=True, slots=True)
class Hello:
    site: str
    boot_id: str
    cloud: str
    region: str
    models: tuple[Model, ...]
    slots: int
    kv_capacity_tokens: int
    input_usd_per_mtok: float
    output_usd_per_mtok: float
    cached_usd_per_mtok: float | None  # None: as any input
    usd_per_hour: float
    version: str
    engine: str = "native"
    pool: str = ""
    attempts: tuple[str, ...] = ()
    takes_orders: bool = False
    trains: Trains | None = None


@dataclass(frozen=True, slots=True)
class Models:
    """All models that the site serves from now on."""

    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class Ordered:
    """`error`: why an order has changed nothing, empty if it is carried out."""

    order_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """The attempt waits for its model to wake."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's figures as they are, or as they were before it stalled."""

    seq: int
    figures: LoadFigures
    stalled_s: float = 0.0
    unknown_messages: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    attempt_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Counted:
    attempt_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    attempt_id: str
    reason: Reason
    message: str
    param: str = ""


class Delta(NamedTuple):
    """An increment of one choice. A tuple, as `Output` is: there is one for each row of each iteration."""

    attempt_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    completion_tokens: int
    finish: Finish | None = None
    error: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    timings: Timings | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    refusal: str = ""
    reasoning_tokens: int = 0
    stop_sequence: str = ""
    pooled: Sequence[Pooled] = ()


@dataclass(frozen=True, slots=True)
class Step:
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Bid:
    """The site asks for work: it has room."""


@dataclass(frozen=True, slots=True)
class Released:
    release_id: str
    attempt_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int
    unix_s: float


@dataclass(frozen=True, slots=True)
class Draining:
    reason: str


@dataclass(frozen=True, slots=True)
class Bye:
    reason: str


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Prompts computed here for other gateways, by their hashes."""

    hashes: bytes


FromGateway: TypeAlias = (
    Welcome
    | Assign
    | Count
    | Rejected
    | Cancel
    | Release
    | ModelOrder
    | Ping
    | ReportPace
    | Train
    | StopTraining
)
FromSite: TypeAlias = (
    Hello
    | Models
    | Ordered
    | Held
    | Load
    | Accepted
    | Rejected
    | Counted
    | Step
    | Bid
    | Released
    | Pong
    | Draining
    | Bye
    | Prefixes
    | Training
)

OnModelOrder: TypeAlias = Callable[[ModelOrder, Callable[[str], None]], None]
"""Callback for an order; replies once, with the error or nothing."""
OnTraining: TypeAlias = Callable[[Train | StopTraining], None]
"""Callback for an order to train, or to stop."""
OnFinish: TypeAlias = Callable[[Assign, int, Output], None]
"""Callback for the last output of each choice of an attempt; the number is that of the choice."""
