"""Define requests and outputs: plain values shared by every part of the engine.

Holds no tensors and knows nothing of the wire format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

from site_engine.core.chain import ServedVariant
from site_engine.core.inbox import InboxPlace
from site_engine.core.remaining_curve import RemainingCurve, RemainingLine


class Guide(Protocol):
    """The position of one answer in its grammar."""

    @property
    def matcher(self) -> Any:
        """The matcher of llguidance, from which bitmasks are computed."""
        ...

    @property
    def ended(self) -> bool:
        """Return whether the grammar is satisfied and nothing can follow."""
        ...

    @property
    def error(self) -> str: ...

    def take(self, token_id: int) -> bool:
        """Advance by a token; return False if the grammar does not allow it here."""
        ...


class Grammar(Protocol):
    """A compiled grammar that any number of answers can follow."""

    @property
    def source(self) -> str:
        """The grammar's source text, from which another process can compile an equal grammar."""
        ...

    def start(self) -> Guide: ...


class Lane(IntEnum):
    """Scheduling lanes: interactive requests go before offline ones."""

    CHAT = 0
    BATCH = 1


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # never set by the engine: the tool-call parser outside sets it
    CONTENT_FILTER = "content_filter"  # set only by remote servers
    CANCELLED = "cancelled"
    FAILED = "failed"


class State(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    LAST = "last"  # the last token is being computed: no more chunks are planned
    FINISHED = "finished"


class RejectionReason(StrEnum):
    FULL = "full"
    CONTEXT_LENGTH = "context_length"
    INVALID = "invalid"
    MODEL_UNKNOWN = "model_unknown"


class RequestRejected(Exception):
    """Raised for a request that is not accepted; `message` says what to change, `param` names the field."""

    def __init__(self, reason: RejectionReason, message: str, param: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param


class Moved(NamedTuple):
    """The state, besides the tokens, of a request that moves from one engine to another of the same host.

    Times are in seconds on the host's monotonic clock. The keys and values of the first `computed` tokens
    are at `place`; without a place these tokens are recomputed.
    """

    arrived_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    fingerprint: str = ""  # of the variant that answers, empty for the base
    computed: int = 0
    place: InboxPlace | None = None


MAX_LOGPROBS = 20
"""Limit on the alternative tokens per output token for which log probabilities can be requested."""
NO_LINE = None, RemainingLine(0, 0, 0.0, 0.0)
"""The initial `Request._line`, which belongs to no curve."""
MIN_RANDOM = 1e-6
"""Temperature or top_p below this value means greedy; the value would underflow in float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling and stopping rules. A rule at its neutral value is off."""

    max_tokens: int | None = None  # None: up to the engine's limit of tokens
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 0: greedy
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # alternatives per token; 0: only the chosen one
    prompt_logprobs: bool = False
    left_out: frozenset[str] = frozenset()  # fields that the client did not set: they hold OpenAI's defaults

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_RANDOM or self.top_p < MIN_RANDOM or self.top_k == 1

    @property
    def runs_out(self) -> bool:
        """Return whether only the token limit can end the response."""
        return self.ignore_eos and not self.stop and not self.stop_token_ids

    def with_defaults(self, defaults: Mapping[str, float]) -> Sampling:
        """Return these rules with the model's `defaults` for the fields that the client did not set."""
        taken: dict[str, Any] = {name: defaults[name] for name in self.left_out & defaults.keys()}
        return replace(self, **taken) if taken else self

    def after(self, tokens: int) -> Sampling:
        """Return these rules with the token limits reduced by `tokens` already generated."""
        max_tokens = None if self.max_tokens is None else max(0, self.max_tokens - tokens)
        return replace(self, max_tokens=max_tokens, min_tokens=max(0, self.min_tokens - tokens))


class Thinking(NamedTuple):
    """The marks around the reasoning that precedes a response's text.

    `opened`: the prompt already contains the begin mark. `closed`: the prompt already contains the end mark,
    so no reasoning is expected. `call`: the mark of a tool call, which also ends the reasoning; empty if
    tool calls may be part of the reasoning.
    """

    begin: str
    end: str
    opened: bool = False
    closed: bool = False
    call: str = ""


@dataclass(slots=True, eq=False)
class Request:
    """One generation. The caller sets the fields above the line; the engine owns those below it."""

    id: str
    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    remaining: RemainingCurve = field(default_factory=RemainingCurve)
    lane: Lane = Lane.CHAT
    priority: int = 0  # lower runs earlier within a lane
    tenant: str = ""
    deadline_s: float | None = None  # on the engine's clock
    choice: int = 0  # of n: part of the seed
    resumed: Sequence[int] = ()  # tokens generated at another site, never emitted again
    resumed_chars: int = 0  # characters of the output text that were already delivered
    resumed_reasoning_chars: int = 0  # characters of the reasoning that were already delivered
    thinking: Thinking | None = None
    grammar: Grammar | None = None  # which the response must follow
    shown: Mapping[int, str] = field(default_factory=dict)  # text of special tokens that this response shows
    follows: bool = False  # the response continues the text of the prompt (completions)
    chain: str = ""  # the variant that answers; empty: the base
    any_order: bool = False  # batch lines of a tenant that set this may overtake one another
    prefill_heavy: bool = False  # an any_order line that needs compute more than memory: it is paced
    # ---- set by the engine
    state: State = field(default=State.WAITING, init=False)
    tokens: list[int] = field(default_factory=list, init=False)  # prompt and output
    prompt_len: int = field(default=0, init=False)
    max_tokens: int = field(default=0, init=False)  # clipped to the room beside the prompt
    computed: int = field(default=0, init=False)  # leading tokens whose keys and values are in the pages
    received: int = field(default=0, init=False)  # leading tokens with received, still unused keys and values
    pages: list[int] = field(default_factory=list, init=False)
    row: int = field(default=-1, init=False)  # index in the runner's tables while running, else -1
    cached_tokens: int = field(default=0, init=False)  # prefix-cache hits of the first prefill
    preemptions: int = field(default=0, init=False)
    charged: float = field(default=0.0, init=False)  # output tokens charged to its tenant
    length_factor: float = field(default=1.0, init=False)  # length over forecast of requests like this one
    arrived_s: float = field(default=0.0, init=False)
    started_s: float | None = field(default=None, init=False)
    first_token_s: float | None = field(default=None, init=False)
    ends: frozenset[int] = field(default=frozenset(), init=False)  # tokens that end the response
    alone_until: int = field(default=0, init=False)  # outputs below so many response tokens are one token
    guide: Guide | None = field(default=None, init=False)  # the answer's position in the grammar
    variant: ServedVariant | None = field(default=None, init=False)  # of `chain`; None: the base
    _line: tuple[RemainingCurve | None, RemainingLine] = field(default=NO_LINE, init=False)  # current segment

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.resumed]
        self.prompt_len = len(self.prompt)

    @property
    def generated(self) -> int:
        """Return the number of response tokens so far, resumed ones included."""
        return len(self.tokens) - self.prompt_len

    @property
    def virtual_tokens(self) -> int:
        """Return the number of tokens before the prompt whose keys and values the variant supplies.

        Their ids are 0.
        """
        return self.prompt_len - len(self.prompt)

    def answered_by(self, variant: ServedVariant | None) -> None:
        """Set the variant that answers, None for the base, and prepend its virtual tokens."""
        self.variant = variant
        more = 0 if variant is None else variant.virtual_tokens - self.virtual_tokens
        self.tokens[:0] = [0] * more
        self.prompt_len += more

    def to_move(self) -> Moved:
        """Return the state that another engine needs to continue, without keys and values."""
        fingerprint = "" if self.variant is None else self.variant.fingerprint
        times = self.arrived_s, self.started_s, self.first_token_s
        return Moved(*times, self.preemptions, self.cached_tokens, fingerprint)

    def take_up(self, moved: Moved) -> None:
        """Restore the times and counts of a request that another engine has begun."""
        self.arrived_s, self.started_s, self.first_token_s = moved[:3]
        self.preemptions, self.cached_tokens = moved.preemptions, moved.cached_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Return whether the prompt's log probabilities, which the host computes, are still missing."""
        return self.sampling.prompt_logprobs and self.first_token_s is None

    @property
    def reads_again(self) -> bool:
        """Return whether this is not the first prefill, so that cached pages may be the request's own."""
        return self.preemptions > 0 or self.first_token_s is not None

    @property
    def has_adapter(self) -> bool:
        """Return whether an adapter answers, which needs an adapter slot while the request runs."""
        return self.variant is not None and self.variant.rank > 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def expected_remaining(self) -> float:
        """Return the expected number of remaining tokens, at least 1.

        Written for speed: each load report calls it for all running requests.
        """
        generated = len(self.tokens) - self.prompt_len
        curve, line = self._line
        if curve is not self.remaining or not line.begins <= generated < line.ends:
            line = self.remaining.line(generated)
            self._line = self.remaining, line
        left = line.expected + line.slope * (generated - line.begins)
        most = float(self.max_tokens - generated)
        left = most if most < left else left
        return left if left > 1.0 else 1.0

    def typical_length(self) -> float:
        return min(self.remaining.typical(), float(max(1, self.max_tokens)))

    def p90_remaining(self) -> int:
        generated = self.generated
        return min(self.remaining.p90(generated), max(1, self.max_tokens - generated))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its bytes (possibly part of a character) and its log probability.

    The log probability is None for the first token of a prompt.
    """

    token: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A delta of one tool call: first its id and name, then pieces of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def merge_tool_calls(deltas: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Merge neighbouring deltas of one call into one, in their order."""
    merged: list[ToolCall] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index and not delta.id:
            merged[-1] = replace(merged[-1], arguments=merged[-1].arguments + delta.arguments)
        else:
            merged.append(delta)
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Timings:
    queued_s: float  # from submission until first planned
    prefill_s: float  # from first planned until the first token
    decode_s: float  # from the first token until the last
    cached_prompt_tokens: int
    preemptions: int
    cached_unknown: bool = False  # the server behind the site does not report its cache hits


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of input `index`: its embedding (float32, little endian) or the document's score."""

    index: int
    vector: bytes = b""
    score: float = 0.0


class Output(NamedTuple):
    """The tokens and text of one request in one iteration. `finish` is set exactly once, in the last output.

    `timings` are set in the last output and with the first token after each start.

    A tuple, since every row of every iteration creates one: a frozen dataclass takes five times as long.
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    error: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    timings: Timings | None = None
    completion_tokens: int = 0
    prompt_tokens: int = 0  # set by engines that count prompts only at the end
    tool_calls: tuple[ToolCall, ...] = ()  # set by engines that parse tool calls themselves
    reasoning: str = ""  # the reasoning that precedes the text
    refusal: str = ""  # set only by remote servers
    reasoning_tokens: int = 0  # reasoning tokens so far, part of completion_tokens
    stop_sequence: str = ""  # the stop string that ended the response
    pooled: tuple[Pooled, ...] = ()  # set only by servers that embed or rank
