"""The values of the gateway: frozen and plain. Protobuf, JSON and SQL are converted to these at the edge."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

import msgspec

from gateway.blocks import Block
from gateway.decision import PlacementLimits
from gateway.device import DeviceLoad
from gateway.prompt import Chat, Pooled, Pooling, Prompt
from gateway.trains import Trains


class Lane(IntEnum):
    """Interactive queries run before batch lines at a site."""

    INTERACTIVE = 0
    BATCH = 1


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters, with OpenAI's defaults. `max_tokens` None means as long as the context allows.

    `guided_json`: the JSON schema of the answer, or empty. `left_out`: fields left to the model's defaults.
    """

    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
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
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    echo: bool = False
    guided_json: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def resumable(self) -> bool:
        """Return whether a failed answer can be resumed elsewhere from the delivered tokens alone."""
        return self.n == 1 and self.logprobs is None and not self.echo


@dataclass(frozen=True, slots=True)
class Caller:
    """The API key of a request, and its tenant. `models` and `regions` None means every one of them.

    `first_id`: the first of the keys that replaced one another, whose quotas they share; empty means its own
    id. `best_priority`: no query of the caller goes before others of this priority.
    """

    key_id: str
    tenant: str
    models: frozenset[str] | None = None
    admin: bool = False
    regions: frozenset[str] | None = None
    first_id: str = ""
    best_priority: int = 0

    @property
    def quota_id(self) -> str:
        return self.first_id or self.key_id

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def may_ask(self, model: Model) -> bool:
        """Return whether the key may use a model: by its name, or as its tenant's own by the base's name."""
        is_own = model.tenant == self.tenant != ""
        return self.may_use(model.id) or (is_own and self.may_use(model.parent))

    def sites_of(self, sites: Sequence[Site]) -> Sequence[Site]:
        """Return those of the sites that are in regions of the key."""
        if self.regions is None:
            return sites
        return [site for site in sites if site.identity.region in self.regions]


SHADOW_TENANT: Final = "(shadow)"
"""The tenant of copied queries."""


class Query(msgspec.Struct, frozen=True):
    """One user request. `id` is unique and made by the gateway; `request_id` is shown to the client, which
    may have chosen it. `together`: the queries of its request, which are answered at the same time.

    `preferred_site` is the site to which a batch assigned the query jointly with others, None if the query is
    decided alone. `any_order`: of a line of a batch, which others of the tenant may overtake at a site;
    `prefill_heavy`: it takes computing rather than memory. `asked_model`: the route to its model, or empty.
    `conversation`: the client's name of it, or empty. Times are seconds on the gateway's monotonic clock.
    """

    id: str
    model: str
    prompt: Prompt
    sampling: Sampling
    caller: Caller
    received_s: float
    deadline_s: float
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    preferred_site: str | None = None
    any_order: bool = False
    prefill_heavy: bool = False
    limits: PlacementLimits | None = None
    request_id: str = ""
    traceparent: str = ""
    asked_model: str = ""
    conversation: str = ""
    together: int = 1

    @property
    def text(self) -> str:
        """Return the text to forecast from: the last user message, the text, or nothing for token ids."""
        if isinstance(self.prompt, Chat):
            return next((m.content for m in reversed(self.prompt.messages) if m.role == "user"), "")
        return self.prompt if isinstance(self.prompt, str) else ""

    @property
    def needs(self) -> frozenset[str]:
        return needs(self.prompt, self.sampling)

    @property
    def prompt_tokens_guess(self) -> int:
        """Guess the prompt's tokens: one for 4 characters, 4 for a message, and what its images may take."""
        if isinstance(self.prompt, Chat):
            messages = sum([4 + m.chars // 4 for m in self.prompt.messages])
            if images := self.prompt.images:
                messages += sum(each.tokens for each in images)
            return messages + (len(self.prompt.tools_json) + len(self.prompt.template_kwargs_json)) // 4
        if isinstance(self.prompt, Pooling):
            return self.prompt.tokens
        if isinstance(self.prompt, str):
            return 1 + len(self.prompt) // 4
        return len(self.prompt)


def needs(prompt: Prompt, sampling: Sampling) -> frozenset[str]:
    """Return the features of a model that the query requires."""
    if isinstance(prompt, Pooling):
        return frozenset({prompt.task})
    wanted = set()
    if sampling.logprobs is not None:
        wanted.add("logprobs")
    if sampling.guided_json:
        wanted.add("guided")
    if isinstance(prompt, Chat):
        if prompt.tools_json:
            wanted.add("tools")
        if prompt.template_kwargs_json:
            wanted.add("template_kwargs")
        if images := prompt.images:
            wanted.add("vision")
            if any(each.fetched for each in images):
                wanted.add("image_urls")
    return frozenset(wanted)


# ---- a site --------------------------------------------------------------------------------------


class SiteState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    PAUSED = "paused"
    EJECTED = "ejected"
    STALE = "stale"
    DOWN = "down"


class ModelState(StrEnum):
    """A model that sleeps has no memory of its own at its site; a query for it wakes it."""

    READY = "ready"
    WAKING = "waking"
    SLEEPING = "sleeping"


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    revision: str
    context_tokens: int
    created_s: int
    owned_by: str
    features: frozenset[str] = frozenset()
    max_prompt_chars: int = 0  # a longer text does not fit the context; 0: unknown
    parent: str = ""  # the model of which this is a variant, served or not
    own_bytes: int = 0  # that it needs beside its parent; 0: unknown
    state: ModelState = ModelState.READY
    wake_s: float = 0.0  # that waking takes; 0: unknown
    tenant: str = ""  # whose it is alone; empty: everyone's
    blocks: tuple[Block, ...] = ()  # in memory at the site, as far as it says


@dataclass(frozen=True, slots=True)
class SiteIdentity:
    """The description that a site sends in Hello; its models may change while it is linked."""

    name: str
    boot_id: str
    cloud: str
    region: str
    models: Mapping[str, Model]
    slots: int
    kv_capacity_tokens: int
    input_usd_per_mtok: float = 0.0
    output_usd_per_mtok: float = 0.0
    cached_usd_per_mtok: float | None = None  # of input that the site had computed before; None: as any
    usd_per_hour: float = 0.0  # of a site that is paid by the hour instead
    engine: str = "native"
    version: str = ""
    takes_orders: bool = False  # of operators, for variants
    pool: str = ""  # machines of one cloud's group are one pool; empty: the site is its own
    trains: Trains | None = None


@dataclass(frozen=True, slots=True)
class IterationCost:
    """The cost of one engine iteration in seconds, linear in rows, new tokens and KV tokens read."""

    base_s: float = 0.0
    per_row_s: float = 0.0
    per_token_s: float = 0.0
    per_kv_token_s: float = 0.0

    def seconds(self, rows: float, tokens: float, kv_tokens: float) -> float:
        return (
            self.base_s + self.per_row_s * rows + self.per_token_s * tokens + self.per_kv_token_s * kv_tokens
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load that a site reports. `received_s` is on this gateway's clock; so are ages."""

    seq: int
    received_s: float
    running: int = 0
    pending: int = 0
    token_load: float = 0.0
    kv_free_tokens: int = 0
    kv_reserved_tokens: int = 0
    kv_extra_tokens: int = 0  # that it has now beyond what it announced: memory of bases that sleep
    tokens_per_s: float = 0.0
    seconds_per_iteration: float = 0.0
    iteration: IterationCost = IterationCost()
    running_remaining: tuple[int, ...] = ()
    running_weight: int = 1
    pending_prompt_tokens: int = 0
    pending_response_tokens: float = 0.0
    tokens_total: int = 0
    prompt_tokens_total: int = 0
    computed_tokens_total: int = 0  # of prompts without what was cached, and of answers; 0: unknown
    unread_tokens: int = 0
    unknown_messages: int = 0
    devices: tuple[DeviceLoad, ...] = ()  # of a site that has several
    training: int = 0  # jobs that are trained there
    training_s_per_iteration: float = 0.0  # that they add to an iteration
    quiet_s: float = 0.0  # so much later than in a small fleet may the next one come


@dataclass(frozen=True, slots=True)
class Credit:
    """The load that this gateway has assigned to a site since the site's last report."""

    requests: int = 0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Site:
    """A site as routing sees it: identity, last report, local credit, and the orders of operators."""

    identity: SiteIdentity
    state: SiteState
    load: LoadReport
    credit: Credit = Credit()
    rtt_s: float = 0.0
    clock_ahead_s: float | None = None  # its wall clock against this gateway's, for people only
    weight: float = 1.0
    pinned_off: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.identity.name


# ---- an answer -----------------------------------------------------------------------------------


class Finish(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`logprob` is None for the first token of an echoed prompt, `raw` empty where one adds no text."""

    token: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


class Opening(msgspec.Struct, frozen=True):
    """The first event of an answer, once the first token is there: from here on the HTTP status is 200."""

    site: str
    cloud: str
    region: str
    attempts: int
    queue_s: float
    prompt_tokens: int
    fingerprint: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A part of one function call: id and name when it begins, then its arguments in parts."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True):
    """New output of one choice; `completion_tokens` and `reasoning_tokens`, a part of them, count so far;
    `finish`, `cached_tokens`, of the prompt, and `stop_sequence`, which ended it, are set in its last delta.
    """

    index: int
    text: str
    completion_tokens: int
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    refusal: str = ""
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    cached_unknown: bool = False
    stop_sequence: str = ""
    pooled: tuple[Pooled, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """The last event of an answer. `completion_tokens` sums the choices; the prompt counts once. Of both, the
    parts that a site had computed before, and that the model spent on reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    nano_usd: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


AnswerEvent = Opening | Delta | Usage
Answer = Callable[[Query], AsyncGenerator[AnswerEvent, None]]
"""Yields Opening, Delta …, Usage; raises a MicoError where it cannot go on. Closing it cancels the query."""
