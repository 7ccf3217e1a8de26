"""Adapters in the overlapped engine: rows of base and adapters share steps. Kernels run interpreted."""

from __future__ import annotations

import copy
import gc
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split

from site_engine.config import SiteConfig, VariantConfig
from site_engine.core.chain import Chain
from site_engine.core.request import Request
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.cuda.adapters import TILE_NUMBERS, AdapterArenas
from site_engine.cuda.batch_layout import decode_shapes, views
from site_engine.cuda.llama_forward import llama_forward
from site_engine.engine.build import overlapped_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported, VariantRefused
from site_engine.model import certify
from site_engine.model.loader import LoadedModel, from_model
from site_engine.plan import parse_gpus, plan
from site_engine.variants.changes import LoadedVariant
from site_engine.variants.projections import ADAPTER_SLOTS, Projection, Size
from tests.support.engine_models import (
    FAMILIES,
    Ticks,
    assert_idle,
    drain,
    greedy,
    greedy_answer,
    random_model,
    uncertified,
)
from tests.support.variants import fine_tuned, lora, prefix_tuned


def fused(name: str) -> tuple[LoadedModel, Any]:
    plain = random_model(FAMILIES[name]())
    return from_model(copy.deepcopy(plain), name=name, eos_token_ids=()), plain


def overlapped(model: LoadedModel, *, certified: bool = False, **settings: Any) -> SiteEngine:
    chosen = {"slots": 4, "token_budget": 40, "page_size": 4, "kv_tokens": 256, "adapter_slots": 2} | settings
    with nullcontext() if certified else uncertified():
        return overlapped_engine(
            model, EngineSettings(**chosen, debug_poison=True), Ticks(), llama_forward(model)
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_rows_with_adapters_get_their_tokens_beside_the_base(name: str, tmp_path: Path) -> None:
    """Adapters and, where the base has them, trained biases take turns in two slots."""
    model, plain = fused(name)
    variants = [
        None,
        lora(tmp_path / "a", plain, rank=4, seed=1),
        lora(tmp_path / "b", plain, rank=16, seed=2, rslora=True),
        lora(tmp_path / "c", plain, rank=2, seed=3, targets=("q_proj", "v_proj", "down_proj")),
    ]
    if name == "qwen2":
        parts = ("k_proj.weight", "0.input_layernorm.weight")
        variants += [
            prefix_tuned(tmp_path / "d", plain, seed=4),
            fine_tuned(tmp_path / "own", plain, lambda each: ".layers.1." in each, seed=6),
            fine_tuned(tmp_path / "parts", plain, lambda each: each.endswith(parts), seed=7),
            fine_tuned(tmp_path / "e", plain, lambda each: each.endswith(".bias"), seed=5),
        ]
    engine = overlapped(model)
    for made in variants[1:]:
        engine.add_variant(made.variant)
    draw = random.Random(4)
    cases = []
    for at in range(len(variants) + 3):
        made, prompt = (
            variants[at % len(variants)],
            [draw.randrange(1, 300) for _ in range(draw.choice((1, 9, 20)))],
        )
        cases.append((made, prompt))
        request = greedy(str(at), prompt, 4)
        request.chain = "" if made is None else made.variant.id
        engine.submit(request)
    got = drain(engine)
    for at, (made, prompt) in enumerate(cases):
        assert got[str(at)].token_ids == greedy_answer(made.alone if made else plain, prompt, 4), at
    assert_idle(engine)


def held_bytes() -> dict[int, int]:
    """Return the bytes of all tensors, those that share memory once, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def test_an_adapter_needs_a_slot_and_its_copy_in_host_memory_alone(tmp_path: Path) -> None:
    model, plain = fused("qwen2")
    plain.save_pretrained(tmp_path / "base")
    engine = overlapped(model, adapter_slots=ADAPTER_SLOTS)
    runner: Any = engine.runner
    folders = [lora(tmp_path / str(rank), plain, rank=rank).variant for rank in (16, 4, 9)]
    configured = tuple(VariantConfig(each.id, adapter=each.adapter) for each in folders)
    config = SiteConfig(
        site="a", gateways=("g:1",), model=str(tmp_path / "base"), variants=configured, dtype="float32"
    )
    found = plan(config, parse_gpus("1x1GiB"))
    arenas = [room for arena in runner._arenas._arenas for room in arena[:4]]
    assert sum(room.nbytes for room in arenas) == found.slots_bytes
    engine.add_variant(folders[0])  # computes what certification keeps of the base
    before = held_bytes()
    for each in folders[1:]:
        engine.add_variant(each)
    more = held_bytes().items() - before.items()
    slot_bytes = found.slots_bytes // ADAPTER_SLOTS
    assert sum(size for _, size in more) == len(folders[1:]) * slot_bytes  # on a GPU pinned, in host memory
    assert found.own_bytes == 0


def test_what_the_kernels_do_not_compute_is_refused(tmp_path: Path) -> None:
    model, plain = fused("llama")
    engine = overlapped(model)
    head = lora(tmp_path / "head", plain, targets=("lm_head",))
    norm = fine_tuned(tmp_path / "norm", plain, lambda name: name == "model.norm.weight")
    for made in (head, norm):
        with pytest.raises(VariantRefused, match="engines on a GPU serve LoRA and biases of attention and"):
            engine.add_variant(made.variant)
    with pytest.raises(VariantRefused, match="has rank 32; slots here have 16"):
        engine.add_variant(lora(tmp_path / "large", plain, rank=32).variant)
    with pytest.raises(VariantRefused, match="needs adapter_slots"):
        overlapped(model, adapter_slots=None).add_variant(head.variant)
    assert not engine.variants


@pytest.mark.parametrize("biased", [False, True])
def test_products_are_added_to_the_rows_of_each_slot_and_to_no_other(biased: bool) -> None:
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    depth, columns = 200, (70, 30, 24)
    arenas = AdapterArenas([Size(depth, columns, biased)], 2, slots=3, rank=8, like=torch.zeros(1))
    (arena,) = arenas._arenas
    for room in (arena.down, arena.up, arena.scales, arena.biases):
        room.copy_(some(*room.shape))
    arena.down[1] = arena.biases[1] = torch.nan  # a slot that no row reads
    requests = [Request(str(at), [0] * 30) for at in range(4)]
    one, two = (LoadedVariant(Chain(name, name, (), 0, ()), {}, rank=8) for name in ("one", "two"))
    requests[1].variant = requests[3].variant = one
    requests[2].variant = two
    arenas.slot_of[one], arenas.slot_of[two] = 2, 0
    plan = SchedulePlan(
        [ScheduledChunk(requests[at], 3, 1, True) for at in (0, 1)],
        [ScheduledChunk(requests[2], 0, 5, True), ScheduledChunk(requests[3], 0, 19, True)],
    )
    slots = [None, 2, *[0] * 5, *[2] * 19, 2, 2]
    tokens = len(slots)  # the last two are padding, which goes with the last chunk
    numbers = np.zeros((arenas.tiles(tokens), TILE_NUMBERS), dtype=np.int32)
    arenas.fill(numbers, plan, tokens)
    tiles = torch.from_numpy(numbers)
    given, before = some(tokens, depth), some(tokens, sum(columns))
    got = arenas.add(1, Projection(0), tiles, given, before.clone())
    for row, slot in enumerate(slots):
        added = torch.zeros(sum(columns))
        if slot is not None:
            shrunk = (arena.down[slot, 1] @ given[row]).view(3, -1)
            ends = torch.tensor([0, *columns]).cumsum(0)
            for group in range(3):
                of = slice(int(ends[group]), int(ends[group + 1]))
                added[of] = arena.up[slot, 1, of] @ shrunk[group] * arena.scales[slot, 1, group]
            added += arena.biases[slot, 1] if biased else 0.0
        torch.testing.assert_close(got[row], before[row] + added, rtol=1e-4, atol=1e-3)
    assert torch.equal(got[0], before[0])


def test_all_rows_of_a_step_of_padding_are_the_base_s() -> None:
    runner: Any = overlapped(fused("llama")[0]).runner
    for rows in (1, 2, 16, 64):
        shape = decode_shapes(rows, 1)[0]
        shape = shape._replace(tiles=runner._arenas.tiles(shape.tokens))
        tiles = views(runner._padding(shape).numpy(), shape).tiles.reshape(-1, TILE_NUMBERS)
        assert (tiles[:, 0] == -1).all(), rows
        numbers = tiles[:, 1:].ravel()
        assert sorted(numbers[numbers >= 0]) == list(range(shape.tokens)), rows


def test_kernels_that_add_something_else_are_found_before_the_site_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = AdapterArenas.add

    def half(self: AdapterArenas, layer: int, projection: Projection, *given: torch.Tensor) -> torch.Tensor:
        before = given[2].clone()
        return before + (add(self, layer, projection, *given) - before) / 2

    monkeypatch.setattr(AdapterArenas, "add", half)
    with pytest.raises(ModelNotSupported, match="other logits here than the reference, with a variant"):
        overlapped(fused("llama")[0], certified=True)


def test_rounding_that_moves_an_adapter_far_stops_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of certification: what rounding does to the adapter's own logits."""
    monkeypatch.setitem(certify.TOLERANCE, torch.float16, 0.004)  # more than the base's rows are off
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=192,
        initializer_range=0.8,
    )
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    overlapped(from_model(plain.eval().requires_grad_(False), eos_token_ids=()), certified=True)
