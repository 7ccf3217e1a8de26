"""Stand-ins for the surroundings of the site's link: an engine without a model, a tokenizer, a clock."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from site_engine.core.chain import Block, BlockKind, Chain, Variant
from site_engine.core.inbox import InboxPlace
from site_engine.core.load import IterationCost, LoadFigures
from site_engine.core.request import (
    Finish,
    Moved,
    Output,
    RejectionReason,
    Request,
    RequestRejected,
)
from site_engine.engine.loading import Loaded
from site_engine.engine_client import Facts
from site_engine.errors import VariantRefused
from site_engine.messages import Hello, Model

CONTEXT_TOKENS = 64
VOCABULARY = 128


class FakeClock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class _Running:
    request: Request
    max_tokens: int
    prompt_left: int
    tokens: int = 0


class FakeInbox:
    """Takes no keys and values."""

    def meet(self, inboxes: object) -> None:
        """Do nothing."""


@dataclass
class FakeEngine:
    """Echoes the prompt, letter by letter and round again: one token per step and running request.

    A prompt is read `chunk` tokens a step, so that a prefill can be interrupted.
    """

    slots: int = 2
    max_pending: int = 4
    chunk: int = 8
    width: int = 1  # how often the text of a token repeats its letter
    failures: list[Exception] = field(default_factory=list)  # what the next steps raise
    dead: bool = False  # no request gets a token any more
    doomed: set[str] = field(default_factory=set)  # these get none
    running: dict[str, _Running] = field(default_factory=dict)
    pending: dict[str, Request] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)  # tokens of pending ones, by another engine
    cancelled: list[Output] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)  # of those that their text has ended
    tokens_total: int = 0
    variants: dict[str, Chain] = field(default_factory=dict)
    may_load: threading.Event = field(default_factory=threading.Event)
    no_memory: bool = False
    adapter_slots: bool = False  # adapters wait in host memory, unless they are `resident`
    resident: frozenset[str] = frozenset()
    inbox: FakeInbox = field(default_factory=FakeInbox)

    def __post_init__(self) -> None:
        self.may_load.set()

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.pending or self.cancelled)

    def submit(self, request: Request, moved: Moved | None = None) -> None:
        if request.chain and request.chain not in self.variants:
            raise RequestRejected(RejectionReason.MODEL_UNKNOWN, f"{request.chain} is not served", "model")
        room = CONTEXT_TOKENS - len(request.prompt)
        if room < 1:
            message = f"{len(request.prompt)} prompt tokens do not fit the context of {CONTEXT_TOKENS}"
            raise RequestRejected(RejectionReason.CONTEXT_LENGTH, message, "prompt")
        if moved is not None:
            self.begun[request.id], request.resumed = len(request.resumed), ()
        elif len(self.pending) >= self.max_pending:
            raise RequestRejected(RejectionReason.FULL, f"{self.max_pending} requests wait already")
        self.pending[request.id] = request

    def cancel(self, request_id: str) -> None:
        run = self.running.pop(request_id, None)
        waiting = self.pending.pop(request_id, None)
        if run or waiting:
            tokens = run.tokens if run else 0
            self.cancelled.append(Output(request_id, finish=Finish.CANCELLED, completion_tokens=tokens))

    def end_by_text(self, request_id: str, generated: int) -> None:
        self.lengths[request_id] = generated
        self.cancel(request_id)

    def expect(self) -> None:
        """Do nothing: each iteration is computed when it is launched."""

    def send_ahead(self, request_id: str, to: InboxPlace | None) -> bool:
        return False

    def export(self, request_id: str, to: InboxPlace | None = None) -> tuple[list[Output], Moved | None]:
        known = self.running.pop(request_id, None) or self.pending.pop(request_id, None)
        return [], None if known is None else Moved(0.0)

    def waits(self, request_id: str) -> bool:
        return request_id in self.pending

    def release(self, request_ids: Sequence[str]) -> list[str]:
        return [each for each in request_ids if self.pending.pop(each, None) is not None]

    def load_variant(self, variant: Variant) -> Callable[[], Chain]:
        """Take any folder; one named `broken`, or that has such a file, is refused. Waits for `may_load`."""
        folder = variant.adapter or variant.model
        assert self.may_load.wait(60.0), "a test lets variants load again"
        if variant.fingerprint not in ("", folder) or self.no_memory:
            raise VariantRefused(f"{variant.id} does not fit the memory")
        if folder.endswith("broken") or Path(folder, "broken").exists():
            raise VariantRefused(f"{variant.id}: {folder} holds NaN")
        digest = hashlib.sha256(folder.encode()).hexdigest()
        adapter = Block(digest, BlockKind.ADAPTER, 0, 2, 1_000, self.adapter_slots)

        def publish() -> Chain:
            if variant.id in self.variants:
                raise VariantRefused(f"{variant.id} is served already")
            chain = self.variants[variant.id] = Chain(variant.id, folder, (adapter,), 1_000, ())
            return chain

        return publish

    def remove_variant(self, variant_id: str) -> None:
        if self.variants.pop(variant_id, None) is None:
            raise VariantRefused(f"{variant_id} is not served here")

    def step(self) -> Sequence[Output]:
        outputs, self.cancelled = self.cancelled, []
        while self.pending and len(self.running) < self.slots:
            request = self.pending.pop(next(iter(self.pending)))
            begun = self.begun.pop(request.id, 0)
            self.running[request.id] = _Running(
                request, self._max_tokens(request), len(request.prompt), begun
            )
        if self.failures:
            self.cancelled = outputs
            raise self.failures.pop(0)
        for run in list(self.running.values()):
            run.prompt_left -= self.chunk
            if self.dead or run.request.id in self.doomed:
                del self.running[run.request.id]
                outputs.append(Output(run.request.id, finish=Finish.FAILED, error="no such device"))
            elif run.prompt_left <= 0:
                outputs.append(self._token(run))
        return outputs

    def load(self) -> LoadFigures:
        waiting = sum(len(each.prompt) for each in self.pending.values())
        return LoadFigures(
            running=len(self.running),
            pending=len(self.pending),
            token_load=float(waiting),
            kv_free_tokens=CONTEXT_TOKENS * (self.slots - len(self.running)),
            kv_reserved_tokens=0,
            tokens_per_s=100.0,
            seconds_per_iteration=0.01,
            iteration=IterationCost(0.01, 0.0, 0.0, 0.0),
            running_remaining=tuple(sorted(run.max_tokens - run.tokens for run in self.running.values())),
            running_weight=1,
            pending_prompt_tokens=waiting,
            pending_response_tokens=0.0,
            tokens_total=self.tokens_total,
            prompt_tokens_total=0,
            unread_tokens=0,
            resident=self.resident,
        )

    def _token(self, run: _Running) -> Output:
        prompt, generated = run.request.prompt, len(run.request.resumed) + run.tokens
        token = prompt[generated % len(prompt)]
        run.tokens += 1
        self.tokens_total += 1
        output = Output(run.request.id, chr(token) * self.width, (token,), completion_tokens=run.tokens)
        if run.tokens < run.max_tokens:
            return output
        del self.running[run.request.id]
        return output._replace(finish=Finish.LENGTH)

    def _max_tokens(self, request: Request) -> int:
        return min(CONTEXT_TOKENS - len(request.prompt), _limit(request))


def _limit(request: Request) -> int:
    return CONTEXT_TOKENS if request.sampling.max_tokens is None else request.sampling.max_tokens


class FakeTokenizer:
    """A token is a character; chats are rendered as `role: content` lines."""

    bos_token_id = 1

    def __init__(self, chat_template: str | None = "lines") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        return [ord(each) for each in text]

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        chat_template: None,
        tokenize: bool,
        add_generation_prompt: bool,
    ) -> str:
        return "".join(f"{each['role']}: {each['content']}\n" for each in messages)


HELLO = Hello(
    site="alpha",
    boot_id="boot-1",
    cloud="on-prem",
    region="lab",
    models=(Model("letters", "r1", CONTEXT_TOKENS, 1_700_000_000, ("chat", "logprobs", "resume")),),
    slots=2,
    kv_capacity_tokens=2 * CONTEXT_TOKENS,
    input_usd_per_mtok=0.1,
    output_usd_per_mtok=0.2,
    cached_usd_per_mtok=0.01,
    usd_per_hour=1.5,
    version="0.1.0",
    pool="eu",
    takes_orders=True,
)


def fake_loaded(engine: FakeEngine | None = None, name: str = "letters", weights_bytes: int = 0) -> Loaded:
    engine = engine or FakeEngine()
    kv_tokens = engine.load().kv_free_tokens
    facts = Facts(name, "r1", CONTEXT_TOKENS, VOCABULARY, (), engine.slots, kv_tokens, weights_bytes)
    return Loaded(engine, FakeTokenizer(), facts)
