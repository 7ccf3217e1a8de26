"""Applications of one base, tuned in several ways, and the engines that serve them in three arrangements."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from bench.engine import load_plain
from bench.support.variant_engines import MAX_PENDING, write_adapter
from site_engine.core.chain import Variant
from site_engine.engine.build import overlapped_engine, packed_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model
from site_engine.variants.peft_folder import Adapter, read_adapter

RANK, VIRTUAL_TOKENS = 16, 20
NOISE = 0.02  # of a weight, which tuning all of them moves by


class Kind(StrEnum):
    """How an application was tuned. `BOTTLENECK`: LoRA stands in for an adapter that is refused."""

    LORA = "lora"
    BITFIT = "bitfit"
    PREFIX = "prefix tuning"
    BOTTLENECK = "lora, for a bottleneck adapter"
    FULL = "full"


class Application(NamedTuple):
    """An application and the folder of its adapter; a full one has none."""

    name: str
    kind: Kind
    folder: Path
    seed: int

    @property
    def variant(self) -> Variant:
        return Variant(self.name, adapter=str(self.folder))


class Place(NamedTuple):
    """Where queries of an application go: an engine, and a chain there."""

    engine: SiteEngine
    chain: str


class Sizes(NamedTuple):
    rows: int
    context_tokens: int


def applications(count: int, plain: Any, folder: Path) -> list[Application]:
    """Write adapters of random numbers for so many applications: the kinds in turn, in equal shares.

    LoRA stands in for BitFit where the base has no biases.
    """
    biased = any(name.endswith("proj.bias") for name, _ in plain.named_parameters())
    found = []
    for number in range(count):
        kind = list(Kind)[number % len(Kind)]
        if kind is Kind.BITFIT and not biased:
            kind = Kind.LORA
        one = Application(f"application-{number}", kind, folder / f"application-{number}", number)
        write(one, plain)
        found.append(one)
    return found


def write(one: Application, plain: Any) -> None:
    if one.kind is Kind.FULL:
        return
    if one.kind in {Kind.LORA, Kind.BOTTLENECK}:
        write_adapter(one.folder, plain, RANK, one.seed)
        return
    draw = torch.Generator().manual_seed(one.seed)
    config = plain.config
    if one.kind is Kind.BITFIT:
        settings: dict[str, Any] = {"peft_type": "LORA", "bias": "all", "target_modules": []}
        tensors = {
            f"base_model.model.{name}": each.cpu()
            + torch.randn(each.shape, generator=draw).to(each.dtype).mul(0.1)
            for name, each in plain.named_parameters()
            if name.endswith("proj.bias")
        }
    else:
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        width = heads * (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        settings = {
            "peft_type": "PREFIX_TUNING",
            "num_virtual_tokens": VIRTUAL_TOKENS,
            "num_layers": layers,
            "num_attention_heads": heads,
            "token_dim": width,
        }
        tensors = {"prompt_embeddings": torch.randn(VIRTUAL_TOKENS, 2 * layers * width, generator=draw)}
    one.folder.mkdir(parents=True)
    save_file(tensors, one.folder / "adapter_model.safetensors")
    (one.folder / "adapter_config.json").write_text(json.dumps(settings))


class Engines:
    """Makes engines that all have room for all their rows: memory limits none, however it is arranged."""

    def __init__(self, source: str, device: str, folder: Path, count: int, sizes: Sizes) -> None:
        self._source, self._device, self._sizes = source, device, sizes
        self._dtype = "bfloat16" if device == "cuda" else "float32"
        plain = load_plain(source, device, self._dtype)
        self.weight_bytes = sum(each.nbytes for each in plain.parameters())
        self.applications = applications(count, plain, folder)
        self.base, self._forward = self._loaded(plain)
        self._full: dict[str, SiteEngine] = {}
        self._adapted = [each for each in self.applications if each.kind is not Kind.FULL]
        self.shared = self._engine(self.base, self._forward, self._adapted)

    def together(self) -> dict[str, Place]:
        """One engine for all that share the base, and one for each that does not."""
        return {each.name: self._own(each) or Place(self.shared, each.name) for each in self.applications}

    def apart(self) -> dict[str, Place]:
        """An engine for each application, over shared weights: no batch is common to two."""
        return {
            each.name: self._own(each) or Place(self._engine(self.base, self._forward, [each]), each.name)
            for each in self.applications
        }

    def alone(self) -> dict[str, Place]:
        """An engine for each application with weights of its own, into which adapters are merged."""
        return {each.name: self._own(each) or self._merged(each) for each in self.applications}

    def _loaded(self, plain: Any) -> tuple[LoadedModel, Any]:
        model = from_model(plain, eos_token_ids=())
        if self._device != "cuda":
            return model, None
        from site_engine.cuda.forward import fast_forward  # needs Triton, which not every platform has

        return model, fast_forward(model)

    def _engine(self, model: LoadedModel, forward: Any, variants: Sequence[Application]) -> SiteEngine:
        settings = EngineSettings(
            slots=self._sizes.rows,
            kv_tokens=(self._sizes.rows + 2) * (self._sizes.context_tokens + VIRTUAL_TOKENS + 16),
            adapter_slots=max(1, len(variants)) if variants else None,
            adapter_rank=RANK,
            max_pending=MAX_PENDING,
            prefix_cache=False,  # every prompt is computed, also when it comes again
        )
        if self._device != "cuda":
            engine = packed_engine(model, settings, time.perf_counter)
        else:
            engine = overlapped_engine(model, settings, time.perf_counter, forward)
            warm_graphs(engine, self._sizes.context_tokens)
        for each in variants:
            engine.add_variant(each.variant)
        return engine

    def _own(self, one: Application) -> Place | None:
        """Return the engine of a fully tuned application, the same in every arrangement."""
        if one.kind is not Kind.FULL:
            return None
        if one.name not in self._full:
            plain = load_plain(self._source, self._device, self._dtype)
            draw = torch.Generator(plain.device).manual_seed(one.seed)
            for weight in plain.parameters():
                noise = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=weight.dtype)
                weight.data.add_(noise * weight.abs().mean() * NOISE)
            self._full[one.name] = self._engine(*self._loaded(plain), ())
        return Place(self._full[one.name], "")

    def _merged(self, one: Application) -> Place:
        plain = load_plain(self._source, self._device, self._dtype)
        if one.kind is Kind.PREFIX:
            return Place(
                self._engine(*self._loaded(plain), [one]), one.name
            )  # of which nothing can be merged
        merge(plain, read_adapter(one.folder, plain, self.base.layers, room_bytes=1 << 40))
        return Place(self._engine(*self._loaded(plain), ()), "")


def merge(model: Any, adapter: Adapter) -> None:
    """Make a model compute an adapter by its own weights."""
    for name, product in adapter.low_rank.items():
        weight = model.get_submodule(name).weight.data
        down, up, scale = product.to(weight.device)
        weight += (scale * (up.float() @ down.float())).to(weight.dtype)
    for name, tensors in adapter.own.items():
        for parameter, tensor in tensors.items():
            getattr(model.get_submodule(name), parameter).data.copy_(tensor)
