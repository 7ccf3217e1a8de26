"""Assemble an engine from a loaded model: the KV cache, the runner for the device and the step loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.startup import StartUp
from site_engine.core.step_memory import step_bytes
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported
from site_engine.model import certify
from site_engine.model.kv_cache import KVCache, affordable_tokens
from site_engine.model.loader import LoadedModel
from site_engine.model.page_copies import PageCopies
from site_engine.model.runner import Forward, PackedRunner
from site_engine.model.sleep_memory import HostRoom, SleepMemory
from site_engine.variants import grouped
from site_engine.variants.changes import LoadedVariant
from site_engine.variants.store import VariantStore

if TYPE_CHECKING:
    from site_engine.cuda.adapters import AdapterArenas
    from site_engine.cuda.runner import DeviceRunner

Clock = Callable[[], float]

WARM_CONTEXT_TOKENS = 2048
"""CUDA graphs for contexts up to this length are captured before the first request."""


def build_engine(
    model: LoadedModel, settings: EngineSettings, clock: Clock, startup: StartUp | None = None
) -> SiteEngine:
    """Build the engine for the model's device, ready to serve. Raises ModelNotSupported and ValueError."""
    startup = startup or StartUp(time.monotonic)
    memory = None
    if model.device.type != "cuda":
        if settings.sleep != "disk":
            memory = SleepMemory(model.device, make_room=HostRoom if settings.share_sleeping_memory else None)
            memory.keep(_weights(model))
        return packed_engine(model, settings, clock, memory)
    with startup.part("layers joined and timed"):
        from site_engine.cuda.forward import fast_forward  # needs Triton, which not every platform has
        from site_engine.cuda.llama_forward import LlamaForward

        forward = fast_forward(model)
    if settings.sleep != "disk":
        from site_engine.cuda.device_range import DeviceRange, DeviceRoom, Driver

        with startup.part("weights placed"):
            neighbour = None if settings.sleep == "host" else torch.device(settings.sleep)
            driver = Driver(model.device, neighbour)
            make_room = partial(DeviceRoom, driver) if settings.share_sleeping_memory else None
            memory = SleepMemory(model.device, partial(DeviceRange, driver, neighbour), make_room)
            fused = forward.weights if isinstance(forward, LlamaForward) else []
            memory.keep([*_weights(model), *fused])
    with startup.part("logits compared with the reference"):
        engine = overlapped_engine(model, settings, clock, forward, memory)
    with startup.part("graphs"):
        warm_graphs(engine)
    return engine


def build_follower(model: LoadedModel, settings: EngineSettings) -> tuple[PackedRunner, DeviceRunner | None]:
    """Build the runners with which this rank computes the steps of the first rank's engine.

    Returns the packed runner and, on a GPU, the device runner.
    """
    if model.device.type != "cuda":
        return packed_runner(model, settings), None
    from site_engine.cuda.forward import fast_forward

    forward = fast_forward(model)
    reference = packed_runner(model, settings)
    gc.collect()
    gc.freeze()
    return reference, device_runner(model, settings, reference, forward)


def _weights(model: LoadedModel) -> list[torch.Tensor]:
    """Return a model's parameters and buffers, which never change."""
    return [*model.model.parameters(), *model.model.buffers()]


def packed_engine(
    model: LoadedModel, settings: EngineSettings, clock: Clock, memory: SleepMemory | None = None
) -> SiteEngine:
    """Build an engine that runs packed tokens through PyTorch attention, on any device."""
    runner = packed_runner(model, settings, memory)
    if model.group is not None:
        return SiteEngine(model, runner, settings, clock)
    slots = AdapterSlots(settings.adapter_slots) if settings.adapter_slots else None
    return SiteEngine(model, runner, settings, clock, VariantStore(model, slots))


def overlapped_engine(
    model: LoadedModel,
    settings: EngineSettings,
    clock: Clock,
    forward: Forward | None = None,
    memory: SleepMemory | None = None,
) -> SiteEngine:
    """Build an engine with Triton kernels that launches each step before it reads the previous one.

    Raises ModelNotSupported unless the device's logits equal those of the packed runner, within the tolerance
    of the data type or, with a variant, within the limit for certifying variants.
    """
    from site_engine.cuda.llama_forward import LlamaForward

    arenas = variants = None
    if settings.adapter_slots and isinstance(forward, LlamaForward):
        arenas = forward.arenas(settings.adapter_slots, settings.adapter_rank)
        slots = AdapterSlots(settings.adapter_slots, arenas.place, (arenas.rank,))
        variants = VariantStore(model, slots, arenas.prepare)
        variants.certifier.ready()  # now: steps would wait for it later
    reference = packed_runner(model, settings, memory)
    runner = device_runner(model, settings, reference, forward, arenas)
    limit_tokens = min(model.context_tokens, reference.kv_cache.tokens)
    trials: Iterable[LoadedVariant] = () if arenas is None else arenas.trials(model)
    for variant in chain((None,), trials):  # each trial replaces the previous one in its slot
        difference = certify.runner_difference(runner, reference, model.vocab_size, limit_tokens, variant)
        limit = certify.limit(model.dtype, len(model.layers))
        if variant is not None and variants is not None:
            limit = variants.certifier.limit(variant, difference)
        if not difference <= limit:  # true of NaN, too
            raise ModelNotSupported(
                f"{type(model.model).__name__} computes other logits here than the reference"
                f"{'' if variant is None else ', with a variant'}: "
                f"they differ by {difference:.1e} of the largest (limit {limit:.1e})"
            )
    return SiteEngine(model, runner, settings, clock, variants)


def packed_runner(
    model: LoadedModel, settings: EngineSettings, memory: SleepMemory | None = None
) -> PackedRunner:
    """Build a runner with PyTorch attention and its KV cache. Raises ValueError and NoMemory."""
    kv_cache = allocate_kv_cache(model, settings, memory)
    return PackedRunner(
        model.forward,
        kv_cache,
        slots=settings.slots,
        pages_per_row=_pages_per_row(model, kv_cache),
        use_variants=grouped.rows_of(model.device) if model.group is None else None,
        group=model.group,
    )


def device_runner(
    model: LoadedModel,
    settings: EngineSettings,
    reference: PackedRunner,
    forward: Forward | None = None,
    arenas: AdapterArenas | None = None,
) -> DeviceRunner:
    """Build a runner with Triton kernels that uses the KV cache of `reference`."""
    from site_engine.cuda.runner import DeviceRunner

    config = model.model.config.get_text_config()
    return DeviceRunner(
        forward or model.forward,
        reference,
        slots=settings.slots,
        pages_per_row=_pages_per_row(model, reference.kv_cache),
        heads_per_kv_head=max(
            1, int(config.num_attention_heads) // min(shape.kv_heads for shape in model.layers)
        ),
        arenas=arenas,
        group=model.group,
    )


def warm_graphs(engine: SiteEngine, longest: int = WARM_CONTEXT_TOKENS) -> int:
    """Capture the graphs of common steps before the first request and return their number.

    Graphs of other shapes are captured when first needed.
    """
    from site_engine.cuda.runner import DeviceRunner

    assert isinstance(engine.runner, DeviceRunner)
    gc.collect()
    gc.freeze()  # the collector never scans the loaded objects, so steps do not wait for it
    return engine.runner.warm(min(longest, engine.limit_tokens))


def slots_bytes(engine: SiteEngine) -> int:
    """Return the bytes of the adapter slots on the device."""
    from site_engine.cuda.runner import DeviceRunner

    return engine.runner.slots_bytes if isinstance(engine.runner, DeviceRunner) else 0


def allocate_kv_cache(
    model: LoadedModel, settings: EngineSettings, memory: SleepMemory | None = None
) -> KVCache:
    """Allocate pages for `kv_tokens` or, if None, for the free memory.

    Raises ValueError below one page, and NoMemory.
    """
    tokens = settings.kv_tokens
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the originals of weights that were joined
    if tokens is None:
        needed = _step_bytes(model, settings) if model.device.type == "cuda" else 0
        affordable = affordable_tokens(model.layers, model.dtype, model.device, needed)
        tokens = min(affordable, settings.slots * model.context_tokens)
    if model.group is not None:
        tokens = model.group.least(tokens)
    pages = tokens // settings.page_size
    if pages < 1:
        raise ValueError(f"there is room for {tokens} tokens of keys and values, not for one page")
    copies = PageCopies
    if model.device.type == "cuda":
        from site_engine.cuda.page_copies import DevicePageCopies

        copies = DevicePageCopies
    shape = model.layers, pages, settings.page_size, model.dtype, model.device
    return KVCache(*shape, group=model.group, memory=memory, copies=copies)


def _step_bytes(model: LoadedModel, settings: EngineSettings) -> int:
    config = model.model.config.get_text_config().to_dict()
    budget, ranks = (
        settings.token_budget_on(model.device.type),
        1 if model.group is None else model.group.size,
    )
    return step_bytes(config, budget, settings.slots, model.dtype.itemsize, ranks)


def _pages_per_row(model: LoadedModel, kv_cache: KVCache) -> int:
    return -(-min(model.context_tokens, kv_cache.tokens) // kv_cache.page_size)
