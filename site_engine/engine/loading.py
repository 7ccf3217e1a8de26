"""Load the native engine: model, kernels and first answers, on whatever device the configuration says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from site_engine.config import SLOTS, SiteConfig
from site_engine.core.inbox import InboxAddress
from site_engine.core.slack import Bounds, Deferral
from site_engine.core.startup import StartUp
from site_engine.engine.engine_interface import Engine
from site_engine.engine.ranks import Rank, join
from site_engine.engine_client import Facts
from site_engine.errors import ConfigError, ModelNotSupported, NoMemory, TrainingRefused
from site_engine.first_import import first_import
from site_engine.text.detokenize import TokenNames, Vocabulary
from site_engine.variants.projections import ADAPTER_SLOTS, largest_rank

if TYPE_CHECKING:
    from site_engine.cuda.runner import DeviceRunner
    from site_engine.engine.engine import SiteEngine
    from site_engine.engine.process_sleep import Turns
    from site_engine.engine.settings import EngineSettings
    from site_engine.model.loader import LoadedModel
    from site_engine.model.runner import PackedRunner
    from site_engine.text.grammar import Grammars

log = logging.getLogger(__name__)

SLOTS_ON_GPU = 256
"""The batch with which decode steps of an H200 were measured (bench/results/gpu.md)."""
LONGER_THAN_A_GRAPH = 1_500
"""Tokens left of a prompt after a full iteration that no CUDA graph computes."""


class Loaded(NamedTuple):
    """An engine with its model, which take long to load, and the facts of them that a site announces."""

    engine: Engine
    tokenizer: Any
    facts: Facts
    sleeper: Turns | None = None
    open_inbox: Callable[[], InboxAddress | None] = lambda: None

    @property
    def shares(self) -> str:
        """Return the device whose memory its engine shares with others, as `Turns` does."""
        return "" if self.sleeper is None else self.sleeper.shares


def load_engine(
    config: SiteConfig,
    vocabulary: Vocabulary | None = None,
    startup: StartUp | None = None,
    on_model: Callable[[LoadedModel], None] = lambda model: None,
    rank: Rank | None = None,
) -> Loaded:
    """Load the native engine with the model of `config`. Raises ConfigError with the reason if it can't.

    `vocabulary`: instead of the model's own. `on_model` is called with the model before its engine is built,
    which takes longer. `rank`: the first of the group over which the model is split.
    """
    startup = startup or StartUp(time.monotonic)
    device, dtype = _device(config, startup)
    build = partial(
        _build, config, device, dtype, vocabulary=vocabulary, startup=startup, on_model=on_model, rank=rank
    )
    with _as_config_error(config):
        if device.startswith("cuda"):
            return build()
        with ThreadPoolExecutor(1, "start-up") as thread:  # its OpenMP threads end with it: see EngineThread
            return thread.submit(build).result()


def _build(
    config: SiteConfig,
    device: str,
    dtype: str,
    *,
    vocabulary: Vocabulary | None,
    startup: StartUp,
    on_model: Callable[[LoadedModel], None],
    rank: Rank | None,
) -> Loaded:
    on_gpu = device.startswith("cuda")
    model = _load_model(config, device, dtype, vocabulary=vocabulary, startup=startup, rank=rank)
    on_model(model)
    from site_engine.engine.build import build_engine, slots_bytes
    from site_engine.engine.warmup import warm_up

    settings = _settings(config, device)
    if config.sampling_defaults == "openai":
        model = replace(model, sampling_defaults={})
    engine = build_engine(model, settings, time.monotonic, startup)
    room_tokens = min(model.context_tokens, engine.load().kv_free_tokens)
    longest = settings.token_budget_on(device) + LONGER_THAN_A_GRAPH if on_gpu else 0
    with startup.part("first answers"):
        warm_up(engine, model.vocab_size, room_tokens, longest)
    if config.training and on_gpu:
        with startup.part("training"):
            try:
                engine.training.warm_up()
            except TrainingRefused as refused:
                log.warning("no job could be trained here: %s", refused)
    facts = facts_of(model, engine)._replace(
        weights_bytes=sum(each.nbytes for each in model.model.parameters()),
        slots_bytes=slots_bytes(engine) if on_gpu else 0,
    )
    return Loaded(engine, model.tokenizer, facts, engine.sleeper, engine.inbox.open)


def facts_of(model: LoadedModel, engine: SiteEngine) -> Facts:
    """Return the facts of a model and of its engine, which has not served yet."""
    return Facts(
        model.name,
        model.revision,
        model.context_tokens,
        model.vocab_size,
        model.eos_token_ids,
        engine.settings.slots,
        kv_tokens=engine.load().kv_free_tokens,  # nothing runs yet, so this is the capacity
    )


def load_follower(config: SiteConfig, device: str, rank: Rank) -> tuple[PackedRunner, DeviceRunner | None]:
    """Load what computes the steps of another rank's engine. Raises ConfigError."""
    startup = StartUp(time.monotonic)
    device, dtype = _device(replace(config, device=device), startup)
    with _as_config_error(config):
        model = _load_model(config, device, dtype, vocabulary=TokenNames(), startup=startup, rank=rank)
        from site_engine.engine.build import build_follower

        return build_follower(model, _settings(config, device))


def _device(config: SiteConfig, startup: StartUp) -> tuple[str, str]:
    """Import torch and return the device and data type of a model. Raises ConfigError without the GPU."""
    with startup.part("device"), first_import("torch"):
        import torch

        has_gpu = torch.cuda.is_available()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device.startswith("cuda") and not has_gpu:
        raise ConfigError(f"device is {config.device}, but torch finds no GPU here")
    device = ("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device
    default = "bfloat16" if device.startswith("cuda") else "float32"
    return device, default if config.dtype == "auto" else config.dtype


@contextmanager
def _as_config_error(config: SiteConfig) -> Iterator[None]:
    try:
        yield
    except (ModelNotSupported, NoMemory, ImportError, OSError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"model {config.model!r} cannot be served: {exc}") from exc


def _load_model(
    config: SiteConfig,
    device: str,
    dtype: str,
    *,
    vocabulary: Vocabulary | None,
    startup: StartUp,
    rank: Rank | None,
) -> LoadedModel:
    """Load the model; for a GPU, its weights and Triton come while Python imports transformers."""
    import torch

    where, kind = torch.device(device), getattr(torch, dtype)
    group = None if rank is None else join(rank, where)
    with ThreadPoolExecutor(2, "start-up") as threads:
        weights = launching = None
        if device.startswith("cuda"):
            from site_engine.cuda.first_launch import launch_first
            from site_engine.model.weights import reader

            if group is None and (read := reader(Path(config.model), kind, where)) is not None:
                weights = threads.submit(startup.timed("weights", read)).result
            launching = threads.submit(startup.timed("Triton", partial(launch_first, where, kind)))
        with startup.part("transformers"), first_import("transformers"):
            from site_engine.model import loader

            take_logs_of_transformers()
        model = loader.load(
            config.model,
            device=device,
            dtype=dtype,
            weights=weights,
            vocabulary=vocabulary,
            startup=startup,
            group=group,
        )
        if launching is not None:
            launching.result()
        if config.threads is None and where.type == "cuda":
            torch.set_num_threads(1)  # its threads spin between small copies, on cores that others need
        return model


def _settings(config: SiteConfig, device: str) -> EngineSettings:
    from site_engine.engine.settings import EngineSettings

    on_gpu = device.startswith("cuda")
    takes_adapters = config.variants or config.models_from or config.training
    return EngineSettings(
        slots=slots_on(device, config),
        token_budget=config.token_budget,
        page_size=config.page_size,
        kv_tokens=config.kv_tokens,
        max_pending=config.max_pending,
        share_prefixes=config.share_prefixes,
        iteration_floor_s=config.iteration_floor_s,
        adapter_slots=ADAPTER_SLOTS if on_gpu and takes_adapters else None,
        adapter_rank=largest_rank(config),
        sleep=config.sleep,
        share_sleeping_memory=config.share_sleeping_memory,
        training=Bounds(
            between_tokens_s=config.training_between_tokens_s,
            least_share=config.training_least_share,
            deferral=Deferral(config.training_deferral),
        ),
    )


def slots_on(device: str, config: SiteConfig) -> int:
    max_slots = SLOTS_ON_GPU if device.startswith("cuda") else SLOTS
    return config.slots or min(max_slots, config.token_budget or max_slots)


def take_logs_of_transformers() -> None:
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    hf_logging.disable_default_handler()  # its lines become ours
    hf_logging.enable_propagation()


def grammars_of(tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> Grammars | None:
    """Make the grammars of a model; None, with a warning, if it can't have any: such queries are refused."""
    from site_engine.text.grammar import Grammars, GrammarsUnavailable

    try:
        return Grammars(tokenizer, vocab_size, eos_token_ids)
    except GrammarsUnavailable as exc:
        log.warning("no JSON schemas and no forced calls of functions with this model: %s", exc)
        return None
