"""Engines of one base with and without variants, random adapters, and the time of their steps."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from bench.engine import load_plain
from site_engine.core.chain import Chain, Variant
from site_engine.core.request import Request, Sampling, State
from site_engine.engine.build import overlapped_engine, packed_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model
from site_engine.variants.changes import Change, LoadedVariant
from site_engine.variants.grouped import group_module
from site_engine.variants.store import VariantStore

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTLING = 12  # steps after the last prompt that are not counted
SPARE_TOKENS = 60  # of an answer, so that no row ends while others are timed
BASE = ""
WRITERS = 8  # threads that write the files of adapters
CERTIFIED = 64
MAX_PENDING = 100_000


class Sizes(NamedTuple):
    """The sizes of the work: adapters' rank and slots, rows at once, tokens of prompts, steps of a pass."""

    rank: int
    slots: int
    rows: int
    prompt_tokens: int
    steps: int


class Query(NamedTuple):
    """A prompt to a chain, the base's with an empty name."""

    chain: str
    prompt: list[int]


class Scene:
    """A base, an engine that serves it alone, and engines that serve variants of it.

    On a GPU all share the weights; on a CPU the engine without variants has a copy.
    """

    def __init__(self, source: str, device: str, folder: Path, sizes: Sizes) -> None:
        self.sizes, self._device, self._folder = sizes, device, folder
        plain = load_plain(source, device, "bfloat16" if device == "cuda" else "float32")
        apart = plain if device == "cuda" else copy.deepcopy(plain)
        self.model: LoadedModel = from_model(plain, eos_token_ids=())
        self._forward: Any = None
        if device == "cuda":
            from site_engine.cuda.forward import fast_forward  # needs Triton, which not every platform has

            self._forward = fast_forward(self.model)
        alone = self.model if apart is plain else from_model(apart, eos_token_ids=())
        self.base = self._engine(alone, None)
        self.engine = self._engine(self.model, sizes.slots)
        self.graphs = warm_graphs(self.engine, self.tokens_of_row) if device == "cuda" else 0
        self._with_slots = {sizes.slots: self.engine}
        self.added_s: list[float] = []  # what loading and certifying each adapter took

    def close(self) -> None:
        """Drop the model and all engines, so that another process can have their memory."""
        del self.model, self.base, self.engine, self._with_slots, self._forward

    @property
    def tokens_of_row(self) -> int:
        """The longest prompt and answer of which all rows have room for keys and values."""
        return self.sizes.prompt_tokens + self.sizes.steps + 2 * SPARE_TOKENS

    def _engine(self, model: LoadedModel, adapter_slots: int | None) -> SiteEngine:
        settings = EngineSettings(
            slots=self.sizes.rows,
            kv_tokens=(self.sizes.rows + 2) * (self.tokens_of_row + 16),
            adapter_slots=adapter_slots,
            adapter_rank=self.sizes.rank,
            max_pending=MAX_PENDING,
            prefix_cache=False,  # every prompt is computed, also when it comes again
        )
        if self._device == "cuda":
            return overlapped_engine(model, settings, time.perf_counter, self._forward)
        return packed_engine(model, settings, time.perf_counter)

    def adapter(self, number: int) -> Variant:
        """Return the adapter of a number, written to a folder when it is first asked for."""
        folder = self._folder / f"adapter-{number}"
        if not folder.exists():
            write_adapter(folder, self.model.model, self.sizes.rank, number)
        return Variant(folder.name, adapter=str(folder))

    def tenants(self, count: int) -> list[str]:
        """Let the engine serve so many adapters; return their chains.

        Only the first are certified, which compares their logits with the model's: random weights say no
        more, and a thousand would take minutes.
        """
        with ThreadPoolExecutor(WRITERS) as writers:
            written = list(writers.map(self.adapter, range(count)))
        for number, variant in enumerate(written):
            if variant.id in self.engine.variants:
                continue
            began_s = time.perf_counter()
            if number < CERTIFIED:
                self.engine.add_variant(variant)
            else:
                self.store._served[variant.id] = self.store._prepare(self.store._load(variant))
            self.added_s.append(time.perf_counter() - began_s)
        return [variant.id for variant in written]

    def with_slots(self, count: int, chains: Sequence[str], *, warm: bool = False) -> SiteEngine:
        """Return an engine with so many slots, which serves these adapters of `engine` as prepared there."""
        engine = self._with_slots.get(count)
        if engine is None:
            engine = self._with_slots[count] = self._engine(self.model, count)
            if self._device == "cuda":
                runner: Any = engine.runner
                prepared: Any = self.engine.runner
                runner._arenas._packed = prepared._arenas._packed  # the same for any number of slots
                if warm:
                    warm_graphs(engine, self.tokens_of_row)
        assert isinstance(engine._variants, VariantStore)
        engine._variants._served.update({chain: self.store.served[chain] for chain in chains})
        return engine

    def own_layers(self, count: int, share: float) -> list[str]:
        """Let the engine serve variants of which each owns this share of the layers; return their chains.

        They are made on the device, without files, and not certified.
        """
        chains = []
        body = self.model.model.model
        layers = len(body.layers)
        owned = range(layers - round(share * layers), layers)
        for number in range(count):
            draw = torch.Generator(self._device).manual_seed(number)
            changes = {}
            for name, module in body.named_modules():
                parts = name.split(".")
                if parts[0] != "layers" or len(parts) < 3 or int(parts[1]) not in owned:
                    continue
                if (weight := module._parameters.get("weight")) is None:
                    continue
                own = copy.copy(module)
                noise = torch.randn(weight.shape[0], device=weight.device, generator=draw).to(weight)
                changed = weight.detach() * (1 + 0.1 * noise).view(-1, *[1] * (weight.dim() - 1))
                own._parameters = {**module._parameters, "weight": torch.nn.Parameter(changed, False)}
                own.__dict__.pop("forward", None)
                changes[f"model.{name}"] = Change(own=own)
                group_module(f"model.{name}", module)
            name = f"own-{number}"
            variant = LoadedVariant(Chain(name, name, (), 0, ()), changes)
            self.store._served[name] = self.store._prepare(variant)
            chains.append(name)
        return chains

    @property
    def store(self) -> VariantStore:
        """The variants of `engine`."""
        assert isinstance(self.engine._variants, VariantStore)
        return self.engine._variants

    def forget(self, count: int) -> None:
        """Drop an engine with so many slots and its memory."""
        if count != self.sizes.slots:
            self._with_slots.pop(count, None)

    def loaded(self, chain: str) -> LoadedVariant:
        return self.store.served[chain]

    def prompt(self, seed: int, tokens: int | None = None) -> list[int]:
        draw = random.Random(seed)
        count = tokens or self.sizes.prompt_tokens
        return [draw.randrange(10, self.model.vocab_size) for _ in range(count)]


def write_adapter(folder: Path, model: Any, rank: int, seed: int) -> None:
    """Write a LoRA adapter of all projections as peft does; it changes a product by about a tenth."""
    device = next(model.parameters()).device
    draw = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            columns, depth = module.weight.shape
            down = torch.randn(rank, depth, device=device, generator=draw) * depth**-0.5
            up = torch.randn(columns, rank, device=device, generator=draw) * 0.02
            key = f"base_model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = down.to("cpu", module.weight.dtype)
            tensors[f"{key}.lora_B.weight"] = up.to("cpu", module.weight.dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(PROJECTIONS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def submit(engine: SiteEngine, name: str, query: Query, tokens: int) -> None:
    request = Request(name, query.prompt, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True))
    request.chain = query.chain
    engine.submit(request)


def serve(engine: SiteEngine, work: Sequence[Query], tokens: int) -> tuple[float, list[list[int]]]:
    """Answer all queries with so many tokens each; return the seconds and the answers."""
    answers: list[list[int]] = [[] for _ in work]
    began = time.perf_counter()
    for at, query in enumerate(work):
        submit(engine, f"serve {at}", query, tokens)
    while engine.has_work:
        for output in engine.step():
            assert not output.error, output.error
            answers[int(output.request_id.split()[1])] += output.token_ids
    took_s = time.perf_counter() - began
    assert all(len(answer) == tokens for answer in answers)
    return took_s, answers


def decode(engine: SiteEngine, work: Sequence[Query], steps: int) -> list[float]:
    """Return the seconds of each step in which all queries decode and nothing else happens."""
    for at, query in enumerate(work):
        submit(engine, f"decode {at}", query, steps + SETTLING + SPARE_TOKENS + 1)
    scheduler = engine._scheduler
    for _ in range(SPARE_TOKENS):
        engine.step()
        prompts = [one for one in scheduler.running if one.state is State.PREFILL]
        if len(scheduler.running) == len(work) and not prompts:
            break
    for _ in range(SETTLING):
        engine.step()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        outputs = engine.step()
        took.append(time.perf_counter() - began)
        assert len(outputs) == len(work), f"{len(outputs)} of {len(work)} rows decode"
    for at in range(len(work)):
        engine.cancel(f"decode {at}")
    while engine.has_work:
        engine.step()
    return took
