"""The native engine: load and warm it, here or in a process of its own, and join it with its tokenizer."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from site_engine.config import SiteConfig
from site_engine.core.chain import Chain, Variant
from site_engine.core.startup import StartUp, describe
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.loading import Loaded, grammars_of, take_logs_of_transformers
from site_engine.engine.process_client import EngineProcess
from site_engine.engine.process_messages import Described
from site_engine.engine.process_spawn import Spawn
from site_engine.engine_client import Facts, Group, Listener, Prepared, TrainingEngine
from site_engine.errors import ConfigError, ModelNotSupported, NotServed, VariantRefused
from site_engine.messages import Assign
from site_engine.model import gguf
from site_engine.pool.pool import EnginePool
from site_engine.pool.sleeping import PoolSleep
from site_engine.process_settings import set_up_collector
from site_engine.text.detokenize import Vocabulary
from site_engine.text.tokenize import PromptTokenizer

log = logging.getLogger(__name__)


class EngineCore(Protocol):
    """An engine beside the event loop: `EngineThread` in this process, `EngineProcess` in another.

    Each takes requests of tokens and reports to the listener on the loop; `EngineClient` describes the
    methods.
    """

    def start(self, listener: Listener) -> None: ...
    def stop(self) -> None: ...
    def stalled_s(self) -> float: ...
    def submit(self, group: Group, reply: Callable[[NotServed | None], None]) -> None: ...
    def cancel(self, request_ids: Iterable[str]) -> None: ...
    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None: ...
    def request_load(self) -> None: ...
    def add_variant(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None: ...
    def remove_variant(self, variant_id: str, reply: Callable[[VariantRefused | None], None]) -> None: ...
    @property
    def trainer(self) -> TrainingEngine: ...


class NativeEngine:
    """The EngineClient over a tokenizer, on threads of its own, and an engine.

    An attempt whose model is the id of a variant is answered by the variant, any other by the base.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        core: EngineCore,
        tokenizer_of: Callable[[Chain], PromptTokenizer] | None = None,
    ) -> None:
        """`tokenizer_of` loads the tokenizer of a variant that has its own; it may take seconds."""
        self._tokenizer = tokenizer
        self._core = core
        self._tokenizer_of = tokenizer_of
        self._variants: dict[str, Chain] = {}
        self._tokenizers: dict[str, PromptTokenizer] = {}  # of variants that have their own

    @classmethod
    def from_loaded(
        cls,
        loaded: Loaded,
        post: Callable[[Callable[[], None]], object],
        floor_s: float = 0.0,
        *,
        allow_special_tokens: bool = False,
    ) -> NativeEngine:
        """Join an engine that is loaded in this process with its tokenizer. May take a second.

        `post` carries a call to the event loop. Iterations start at least `floor_s` apart.
        """
        facts = loaded.facts
        tokenizer = prompt_tokenizer(loaded.tokenizer, facts, post, allow_special_tokens=allow_special_tokens)

        def tokenizer_of(chain: Chain) -> PromptTokenizer:
            own = tokenizer_like(loaded.tokenizer, chain.tokenizer)
            of_chain = facts._replace(eos_token_ids=chain.eos_token_ids)
            return prompt_tokenizer(own, of_chain, post, allow_special_tokens=allow_special_tokens)

        return cls(tokenizer, EngineThread(loaded.engine, post, time.monotonic, floor_s), tokenizer_of)

    @property
    def features(self) -> tuple[str, ...]:
        """Features of the model at this site, as Hello names them."""
        return self._tokenizer.features

    @property
    def max_token_chars(self) -> int | None:
        """The most characters of a prompt that one token stands for; None if unknown."""
        return self._tokenizer.max_token_chars

    def start(self, listener: Listener) -> None:
        def refused(variant_id: str, refusal: VariantRefused) -> None:
            self._forget(variant_id)
            listener.refused(variant_id, refusal)

        self._core.start(replace(listener, refused=refused))

    def stop(self) -> None:
        """End all threads, and the engine's process, after the work at hand; what still runs is dropped."""
        for tokenizer in (self._tokenizer, *self._tokenizers.values()):
            tokenizer.close()
        self._core.stop()

    @property
    def waiting(self) -> int:
        return sum(each.waiting for each in (self._tokenizer, *self._tokenizers.values()))

    def waiting_of(self, tenant: str) -> int:
        return sum(each.waiting_of(tenant) for each in (self._tokenizer, *self._tokenizers.values()))

    def stalled_s(self) -> float:
        return self._core.stalled_s()

    def prepare(
        self,
        assign: Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        if assign.model not in self._variants:
            self._tokenizer.prepare(assign, reply, is_wanted)
            return

        def prepared(answer: Prepared | NotServed) -> None:
            reply(answer._replace(chain=assign.model) if isinstance(answer, Prepared) else answer)

        self._tokenizers.get(assign.model, self._tokenizer).prepare(assign, prepared, is_wanted)

    def count(
        self,
        assign: Assign,
        reply: Callable[[int | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tokenizers.get(assign.model, self._tokenizer).count(assign, reply, is_wanted)

    def submit(self, prepared: Prepared, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        self._core.submit(group, reply)

    def cancel(self, request_ids: Iterable[str]) -> None:
        self._core.cancel(request_ids)

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        self._core.release(groups, reply)

    def request_load(self) -> None:
        self._core.request_load()

    @property
    def trainer(self) -> TrainingEngine:
        return self._core.trainer

    @property
    def sleeping(self) -> PoolSleep | None:
        """The sleep of a pool's engine processes; None for an engine whose base cannot sleep."""
        return self._core.sleeping if isinstance(self._core, EnginePool) else None

    # ---- variants

    @property
    def variants(self) -> Mapping[str, Chain]:
        """The variants that are served, by id."""
        return self._variants

    def add_variant(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None:
        """Load, check and certify a variant beside what runs, and serve it; reply with its chain or why not.

        A refused variant leaves nothing behind.
        """

        def serve(chain: Chain) -> None:
            self._variants[chain.id] = chain
            reply(chain)

        def added(answer: Chain | VariantRefused) -> None:
            if isinstance(answer, VariantRefused):
                reply(answer)
            elif answer.tokenizer and self._tokenizer_of is not None:
                loading = asyncio.get_running_loop().run_in_executor(None, self._tokenizer_of, answer)
                loading.add_done_callback(partial(tokenizer_loaded, answer))
            else:
                serve(answer)

        def tokenizer_loaded(chain: Chain, loading: asyncio.Future[PromptTokenizer]) -> None:
            failure = loading.exception()
            if failure is None:
                self._tokenizers[chain.id] = loading.result()
                serve(chain)
            else:
                refusal = VariantRefused(f"{chain.id}: {failure}")
                self._core.remove_variant(chain.id, lambda _: reply(refusal))

        self._core.add_variant(variant, added)

    def remove_variant(self, variant_id: str, reply: Callable[[VariantRefused | None], None]) -> None:
        """Stop serving a variant, except what it has begun. Reply None, or why not."""

        def removed(answer: VariantRefused | None) -> None:
            if answer is None:
                self._forget(variant_id)
            reply(answer)

        self._core.remove_variant(variant_id, removed)

    def _forget(self, variant_id: str) -> None:
        self._variants.pop(variant_id, None)
        self._tokenizers.pop(variant_id, None)  # its threads end after the prompts that they have


async def launch_engine(
    config: SiteConfig, post: Callable[[Callable[[], None]], object], spawn: Spawn
) -> tuple[NativeEngine, Facts]:
    """Load the engine in a process of its own, and its tokenizer here meanwhile. Raises ConfigError with the
    reason.

    The process is ended if this is cancelled or fails.
    """
    startup, began_s = StartUp(time.monotonic), time.monotonic()
    process = await launch_core(config, spawn)
    reading = asyncio.create_task(_read_text(config.model, process, startup))
    try:
        described = await process.described()
        tokenizer, process.vocabulary = await reading
        with startup.part("site's grammars"):
            prompts = await asyncio.to_thread(
                prompt_tokenizer, tokenizer, described, post, allow_special_tokens=config.allow_special_tokens
            )
        facts = await process.ready()
    except BaseException:
        process.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        raise

    def tokenizer_of(chain: Chain) -> PromptTokenizer:
        own = tokenizer_like(tokenizer, chain.tokenizer)
        of_chain = facts._replace(eos_token_ids=chain.eos_token_ids)
        return prompt_tokenizer(own, of_chain, post, allow_special_tokens=config.allow_special_tokens)

    set_up_collector()
    ended_s, parts = time.monotonic(), [*startup.parts, *process.start_parts]
    began_s = min(began_s, *(part.began_s for part in parts))  # a process may have been begun before
    log.info(
        "the engine started in %.1f s, in seconds from its begin: %s",
        ended_s - began_s,
        describe(parts, began_s),
    )
    return NativeEngine(prompts, process, tokenizer_of), facts


async def launch_core(config: SiteConfig, spawn: Spawn) -> EngineProcess | EnginePool:
    """Start the process of the engine, or one for each of several devices; those joined by + are one."""
    settings = engine_settings(config)
    if not config.devices:
        return await EngineProcess.launch(settings, time.monotonic, spawn)
    on_cpu = "+".join(config.devices).split("+").count("cpu")
    threads = config.threads or (max(1, (os.cpu_count() or 1) // on_cpu) if on_cpu else None)
    each = [settings | {"device": device, "devices": (), "threads": threads} for device in config.devices]
    return await EnginePool.launch(each, time.monotonic, spawn, share_prefixes=config.share_prefixes)


async def _read_text(
    source: str, process: EngineProcess | EnginePool, startup: StartUp
) -> tuple[Any, Vocabulary]:
    if source.endswith(gguf.SUFFIX):
        await process.described()  # the engine's process converts the file
    with startup.part("site's tokenizer"):
        return await asyncio.to_thread(load_tokenizer, source)


def engine_settings(config: SiteConfig) -> dict[str, Any]:
    """Return the settings of a site that its engine may know: no secrets, no paths to any."""
    named = ((each, getattr(config, each.name)) for each in fields(config))
    return {each.name: value for each, value in named if each.repr and not isinstance(value, Path)}


def load_tokenizer(source: str) -> tuple[Any, Vocabulary]:
    """Load the tokenizer of a model that was loaded before. Raises ConfigError."""
    from transformers import AutoTokenizer

    from site_engine.text.vocabulary import vocabulary_of

    take_logs_of_transformers()
    try:
        if source.endswith(gguf.SUFFIX):
            source = str(gguf.converted(Path(source)))
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, ModelNotSupported) as exc:
        raise ConfigError(f"the tokenizer of {source!r} cannot be loaded: {exc}") from exc
    return tokenizer, vocabulary_of(tokenizer)


def tokenizer_like(base: Any, folder: str) -> Any:
    """Return the tokenizer of a variant's folder, or the base's, of the same vocabulary, if it has none.

    Raises ConfigError.
    """
    if not (Path(folder) / "tokenizer_config.json").is_file():
        return base
    own, _ = load_tokenizer(folder)
    own.chat_template = own.chat_template or base.chat_template
    return own


def prompt_tokenizer(
    tokenizer: Any,
    facts: Facts | Described,
    post: Callable[[Callable[[], None]], object],
    *,
    allow_special_tokens: bool,
) -> PromptTokenizer:
    return PromptTokenizer(
        tokenizer,
        facts.vocab_size,
        post,
        grammars_of(tokenizer, facts.vocab_size, facts.eos_token_ids),
        context_tokens=facts.context_tokens,
        allow_special_tokens=allow_special_tokens,
    )
