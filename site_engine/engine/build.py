"""Assemble an engine from a loaded model: the KV cache, the runner for the device, and the step loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.startup import StartUp
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported
from site_engine.model import certify
from site_engine.model.kv_cache import KVCache, affordable_tokens
from site_engine.model.loader import LoadedModel
from site_engine.model.runner import Forward, PackedRunner
from site_engine.variants import grouped
from site_engine.variants.changes import LoadedVariant
from site_engine.variants.store import VariantStore

Clock = Callable[[], float]

WARM_CONTEXT_TOKENS = 2048
"""CUDA graphs for contexts up to this length are captured before the first request."""


def build_engine(
    model: LoadedModel, settings: EngineSettings, clock: Clock, startup: StartUp | None = None
) -> SiteEngine:
    """Build the engine for the model's device, ready to serve. Raises ModelNotSupported and ValueError."""
    startup = startup or StartUp(time.monotonic)
    if model.device.type != "cuda":
        return packed_engine(model, settings, clock)
    with startup.part("layers joined and timed"):
        from site_engine.cuda.forward import fast_forward  # needs Triton, which not every platform has

        forward = fast_forward(model)
    with startup.part("logits compared with the reference"):
        engine = overlapped_engine(model, settings, clock, forward)
    with startup.part("graphs"):
        warm_graphs(engine)
    return engine


def packed_engine(model: LoadedModel, settings: EngineSettings, clock: Clock) -> SiteEngine:
    """Build an engine that runs packed tokens through PyTorch attention, on any device."""
    kv_cache = allocate_kv_cache(model, settings)
    runner = PackedRunner(
        model.forward,
        kv_cache,
        slots=settings.slots,
        pages_per_row=_pages_per_row(model, kv_cache),
        use_variants=grouped.rows_of(model.device),
    )
    slots = AdapterSlots(settings.adapter_slots) if settings.adapter_slots else None
    return SiteEngine(model, runner, settings, clock, VariantStore(model, settings.variant_bytes, slots))


def overlapped_engine(
    model: LoadedModel, settings: EngineSettings, clock: Clock, forward: Forward | None = None
) -> SiteEngine:
    """Build an engine that launches each step before it reads the one before, with Triton kernels.

    Raises ModelNotSupported unless the device's logits equal those of the packed runner: within the tolerance
    of the data type, with an adapter within the limit that certifies variants.
    """
    from site_engine.cuda.llama_forward import LlamaForward
    from site_engine.cuda.runner import DeviceRunner

    arenas = variants = None
    if settings.adapter_slots and isinstance(forward, LlamaForward):
        arenas = forward.arenas(settings.adapter_slots, settings.adapter_rank)
        slots = AdapterSlots(settings.adapter_slots, arenas.place, (arenas.rank,))
        variants = VariantStore(model, settings.variant_bytes, slots, arenas.prepare)
        variants.certifier.ready()  # now, since steps wait for it
    kv_cache = allocate_kv_cache(model, settings)
    reference = PackedRunner(
        model.forward,
        kv_cache,
        slots=settings.slots,
        pages_per_row=_pages_per_row(model, kv_cache),
        use_variants=grouped.rows_of(model.device),
    )
    config = model.model.config.get_text_config()
    runner = DeviceRunner(
        forward or model.forward,
        reference,
        slots=settings.slots,
        pages_per_row=_pages_per_row(model, kv_cache),
        heads_per_kv_head=max(
            1, int(config.num_attention_heads) // min(shape.kv_heads for shape in model.layers)
        ),
        arenas=arenas,
    )
    limit_tokens = min(model.context_tokens, kv_cache.tokens)
    checked: list[tuple[LoadedVariant | None, float]] = [(None, certify.TOLERANCE.get(model.dtype, 0.0))]
    if arenas is not None and variants is not None:
        trial = arenas.trial(model)
        checked.append((trial, variants.certifier.reference(trial).limit))
    for variant, limit in checked:
        off = certify.runner_difference(runner, reference, model.vocab_size, limit_tokens, variant)
        if not off <= limit:
            raise ModelNotSupported(
                f"{type(model.model).__name__} computes other logits here than the reference"
                f"{'' if variant is None else ', with an adapter'}: "
                f"they differ by {off:.1e} of the largest (limit {limit:.1e})"
            )
    return SiteEngine(model, runner, settings, clock, variants)


def warm_graphs(engine: SiteEngine, longest: int = WARM_CONTEXT_TOKENS) -> int:
    """Capture the graphs of common steps before the first request and return their number.

    Graphs of other shapes are captured when first needed.
    """
    from site_engine.cuda.runner import DeviceRunner

    assert isinstance(engine.runner, DeviceRunner)
    gc.collect()
    gc.freeze()  # the collector never scans what is loaded, so no step waits for it
    return engine.runner.warm(min(longest, engine.limit_tokens))


def allocate_kv_cache(model: LoadedModel, settings: EngineSettings) -> KVCache:
    """Allocate pages for `kv_tokens`, or for what fits the free memory. Raises ValueError below one page."""
    tokens = settings.kv_tokens
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # of weights that were joined to others
    if tokens is None:
        affordable = affordable_tokens(model.layers, model.dtype, model.device)
        tokens = min(affordable, settings.slots * model.context_tokens)
    pages = tokens // settings.page_size
    if pages < 1:
        raise ValueError(f"there is room for {tokens} tokens of keys and values, not for one page")
    return KVCache(model.layers, pages, settings.page_size, model.dtype, model.device)


def _pages_per_row(model: LoadedModel, kv_cache: KVCache) -> int:
    return -(-min(model.context_tokens, kv_cache.tokens) // kv_cache.page_size)
