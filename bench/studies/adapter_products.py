"""Time what adapters add to each product of a layer of few rows, for many ways to launch its kernel.

    python -m bench.studies.adapter_products --model bench/models/llama-3.1-8b

Whole steps of a model of a few layers, captured as the engine captures them: those of base rows, then with
adapters of all projections, and with parts of their work left out. Then the ways of one projection after the
other are tried beside the best of the others so far, each compared with plain products first. Prints µs a
layer on top of the base's. On a CPU, with TRITON_INTERPRET=1, it compares only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from site_engine.cuda import skinny_gemm
from site_engine.cuda.adapters import TILE_NUMBERS, TILE_ROWS, AdapterArenas, StepAdapters
from site_engine.cuda.batch_layout import Shape, decode_shape, views
from site_engine.cuda.cuda_graph import Step
from site_engine.cuda.llama_forward import LlamaForward, llama_forward
from site_engine.cuda.skinny_gemm import Tile
from site_engine.engine.build import device_runner, packed_runner
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model
from site_engine.variants.projections import Projection

CONTEXT, SLOTS = 160, 32
FACTOR_SIZE = 0.02
TOLERANCE = {torch.bfloat16: 0.02, torch.float32: 1e-4}  # of the largest number of a product


class Mix(NamedTuple):
    """Rows of a step, and the adapters that share them equally."""

    rows: int
    adapters: int


class Way(NamedTuple):
    """How the kernel of one projection is launched; 0 or None: as the engine does."""

    tile: Tile | None = None
    shrunk_parts: int = 0
    programs: int = 0  # of a product in parts
    ranks: int = 0
    registers: int = 0  # of a thread, at most, with few rows

    def __str__(self) -> str:
        shown = [
            "tile {} x {}, {} warps, {} stages".format(*self.tile) if self.tile else "",
            f"shrunk in {self.shrunk_parts}" if self.shrunk_parts else "",
            f"{self.programs} programs" if self.programs else "",
            f"{self.ranks} ranks a dot" if self.ranks else "",
            f"{self.registers} registers" if self.registers else "",
        ]
        return ", ".join(filter(None, shown)) or "as built"


def ways(projection: Projection, rows: int) -> list[Way]:
    """Return what is tried."""
    few = rows <= skinny_gemm.FEW_ROWS
    parted = projection in {Projection.OUTPUT, Projection.DOWN}
    if few:
        more = [Way(registers=registers) for registers in (96, 112, 168)]
    else:
        more = [Way(ranks=ranks) for ranks in (32, 64, 128)]
    more += [Way(shrunk_parts=parts) for parts in (1, 2, 8)]
    if parted:
        more += [Way(programs=programs) for programs in ((128, 256) if few else (192, 256))]
        tiles = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5)]
    elif projection is Projection.GATE_UP:
        tiles = [(64, 128, 4, 4), (64, 64, 4, 4)] if few else [(64, 64, 4, 5), (64, 128, 4, 3)]
    else:
        tiles = [(32, 128, 4, 4), (64, 128, 4, 5)] if few else [(64, 64, 4, 4), (64, 128, 4, 4)]
    return [Way(), *more, *(Way(Tile(*tile)) for tile in tiles)]


@contextmanager
def launched(scene: Scene, chosen: dict[Projection, Way]) -> Iterator[None]:
    """Launch the kernels of products with adapters as chosen."""
    names = (
        "_launch",
        "parts",
        "SHRUNK_PARTS",
        "GATED_SHRUNK_PARTS",
        "WIDE_RANKS",
        "RANKS",
        "PROGRAMS",
        "SHORT_PROGRAMS",
        "FEW_REGISTERS",
    )
    before = {name: getattr(skinny_gemm, name) for name in names}

    def launch(*given: Any, **more: Any) -> None:
        *tensors, tile, part_depth, adapters = given
        way = Way() if adapters is None else chosen.get(scene.projection_of(adapters), Way())
        if way.ranks:
            skinny_gemm.RANKS = skinny_gemm.WIDE_RANKS = way.ranks
        if way.shrunk_parts:
            skinny_gemm.SHRUNK_PARTS = skinny_gemm.GATED_SHRUNK_PARTS = way.shrunk_parts
        if way.registers:
            skinny_gemm.FEW_REGISTERS = way.registers
        try:
            before["_launch"](*tensors, way.tile or tile, part_depth, adapters, **more)
        finally:
            for name in ("SHRUNK_PARTS", "GATED_SHRUNK_PARTS", "WIDE_RANKS", "RANKS", "FEW_REGISTERS"):
                setattr(skinny_gemm, name, before[name])

    def parts(hidden: Any, weight: Any, adapters: Any = None, **more: Any) -> Any:
        way = Way() if adapters is None else chosen.get(scene.projection_of(adapters), Way())
        if way.programs:
            skinny_gemm.PROGRAMS = skinny_gemm.SHORT_PROGRAMS = way.programs
        try:
            return before["parts"](hidden, weight, adapters, **more)
        finally:
            skinny_gemm.PROGRAMS, skinny_gemm.SHORT_PROGRAMS = before["PROGRAMS"], before["SHORT_PROGRAMS"]

    skinny_gemm._launch, skinny_gemm.parts = launch, parts
    try:
        yield
    finally:
        for name, one in before.items():
            setattr(skinny_gemm, name, one)


class Scene:
    """A model of a few layers with random adapters in all slots."""

    def __init__(self, source: str, device: str, layers: int, rank: int) -> None:
        config = transformers.AutoConfig.from_pretrained(source)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        torch.manual_seed(0)
        with torch.device(device):
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model = from_model(plain.eval().requires_grad_(False), eos_token_ids=())
        self.layers = layers
        forward = llama_forward(self.model)
        assert isinstance(forward, LlamaForward)
        self.forward = forward
        self.arenas: AdapterArenas = forward.arenas(SLOTS, rank)
        for arena in self.arenas._arenas:
            arena.down.normal_(0, arena.down.shape[-1] ** -0.5)
            arena.up.normal_(0, FACTOR_SIZE)
            arena.scales.fill_(2.0)
            arena.biases.normal_(0, FACTOR_SIZE)
        settings = EngineSettings(slots=64, kv_tokens=66 * 256, prefix_cache=False)
        reference = packed_runner(self.model, settings)
        self.runner: Any = device_runner(self.model, settings, reference, forward, self.arenas)
        if device == "cuda":  # the memory that graphs share is there as long as one of them
            self._first = self.step(1, 0)

    def projection_of(self, adapters: skinny_gemm.Adapters) -> Projection:
        addresses = [arena.up.untyped_storage().data_ptr() for arena in self.arenas._arenas]
        return Projection(addresses.index(adapters.up.untyped_storage().data_ptr()))

    def tiles(self, rows: int, adapters: int) -> np.ndarray[Any, Any]:
        """Return the tiles of rows of which each adapter has as many, in the slots from the last."""
        tiles = np.full((self.arenas.tiles(rows), TILE_NUMBERS), -1, dtype=np.int32)
        each, at = rows // adapters, 0
        for adapter in range(adapters):
            for begin in range(adapter * each, (adapter + 1) * each, TILE_ROWS):
                some = range(begin, min(begin + TILE_ROWS, (adapter + 1) * each))
                tiles[at, 0], tiles[at, 1 : 1 + len(some)] = SLOTS - 1 - adapter, some
                at += 1
        return tiles

    def step(self, rows: int, adapters: int) -> Step:
        """Capture a decode step of rows with some context; without adapters that of base rows."""
        chunk = self.runner._device.chunk_tokens(rows)
        each = -(-CONTEXT // chunk)
        shape: Shape = decode_shape(rows, rows * each)
        if adapters:
            shape = shape._replace(tiles=self.arenas.tiles(rows))
        block = self.runner._padding(shape)
        to = views(block.numpy(), shape)
        items = to.items.reshape(-1, 4)
        items[: rows * each, 0] = np.repeat(np.arange(rows), each)
        items[: rows * each, 1] = np.tile(np.arange(each), rows)
        items[: rows * each, 2] = CONTEXT + 1
        if adapters:
            to.tiles.reshape(-1, TILE_NUMBERS)[:] = self.tiles(rows, adapters)
        step = Step(self.runner._device, self.forward, shape, arenas=self.arenas)
        step.load(block)
        step.capture(self.runner._stream, self.runner._pool, compiled=False)
        return step

    def us_of(self, rows: int, adapters: int, seconds: float = 0.08) -> float:
        """Return the median µs of a step over a few dozen replays."""
        step = self.step(rows, adapters)
        step.run()
        took: list[float] = []
        ends = time.perf_counter() + seconds
        while len(took) < 10 or time.perf_counter() < ends:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step.run()
            end.record()
            end.synchronize()
            took.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(took)

    def largest_error(self, projection: Projection, rows: int, adapters: int) -> float:
        """Return how far a product with adapters is from plain ones, relative to its largest number."""
        layer = self.forward._layers[0]
        weight, bias = (layer.query_key_value, layer.output, layer.gate_up, layer.down)[projection]
        draw = torch.Generator(weight.device).manual_seed(rows)
        given = torch.randn(rows, weight.shape[1], device=weight.device, generator=draw).to(weight.dtype)
        tiles = torch.from_numpy(self.tiles(rows, adapters)).to(weight.device)
        rows_of = StepAdapters(self.arenas, tiles, rows)
        pdl = weight.is_cuda
        what = rows_of.product(0, projection)
        wanted = given.float() @ weight.float().t() + (0.0 if bias is None else bias.float())
        arena = self.arenas._arenas[projection]
        ends = np.cumsum((0, *self.arenas._sizes[projection].columns))
        for row in range(rows):
            slot = SLOTS - 1 - row // (rows // adapters)
            shrunk = (arena.down[slot, 0].float() @ given[row].float()).view(len(ends) - 1, -1)
            shrunk = (shrunk * arena.scales[slot, 0][:, None]).to(weight.dtype).float()
            for group in range(len(ends) - 1):
                of = slice(int(ends[group]), int(ends[group + 1]))
                wanted[row, of] += arena.up[slot, 0, of].float() @ shrunk[group]
            if arena.biases.shape[-1]:
                wanted[row] += arena.biases[slot, 0].float()
        if projection is Projection.GATE_UP:
            gate, up = wanted.to(weight.dtype).float().chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
            got = skinny_gemm.gated(given, weight, what, pdl=pdl)
        elif projection is Projection.QUERY_KEY_VALUE:
            got = skinny_gemm.whole(given, weight, bias, what, pdl=pdl)
        else:
            got = skinny_gemm.parts(given, weight, what, pdl=pdl).sum(0)
        return float((got.float() - wanted).abs().max() / wanted.abs().max())


def log(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def run(scene: Scene, mix: Mix, ends_s: float) -> None:
    """Try every way of every projection on one mix of rows."""
    rows, adapters = mix
    timed = scene.model.device.type == "cuda"
    sizes = [arena.down[0, 0].nbytes + arena.up[0, 0].nbytes for arena in scene.arenas._arenas]
    base_us = scene.us_of(rows, 0) if timed else 0.0
    log(
        rows=rows,
        adapters=adapters,
        base_us=round(base_us, 1),
        layers=scene.layers,
        read_us_at_4_TB_s={each.name: round(adapters * sizes[each] / 4e6, 2) for each in Projection},
    )
    best: dict[Projection, Way] = {}
    by_part = {}
    for left_out in ("shrinking and expanding", "expanding", "shrinking", "nothing"):
        with leaving_out(left_out):
            by_part[left_out] = round(added_us(scene, best, mix, base_us), 2)
    least_us = by_part["nothing"]
    log(rows=rows, adapters=adapters, added_us_leaving_out=by_part)
    for projection in (Projection.GATE_UP, Projection.DOWN, Projection.QUERY_KEY_VALUE, Projection.OUTPUT):
        for way in ways(projection, rows):
            if time.perf_counter() > ends_s:
                log(projection=projection.name, error="no time")
                break
            found_us = tried(scene, best | {projection: way}, projection, mix, base_us)
            if found_us is not None and found_us < least_us:
                best[projection], least_us = way, found_us
    again = added_us(scene, best, mix, base_us), added_us(scene, {}, mix, base_us)
    log(
        rows=rows,
        adapters=adapters,
        all_best_added_us=round(again[0], 2),
        all_as_built_again_us=round(again[1], 2),
        base_again_us=round(scene.us_of(rows, 0), 1) if timed else 0.0,
        best={each.name: str(way) for each, way in best.items()},
    )


@contextmanager
def leaving_out(what: str) -> Iterator[None]:
    """Let the kernels of products with adapters leave out a part of their work."""
    patched: Any = StepAdapters
    before = patched.__init__

    def begin(step: Any, *given: Any, **more: Any) -> None:
        before(step, *given, **more)
        rows = step._rows
        if "expanding" in what:
            rows.counts[1:].zero_()
        if "shrinking" in what:  # which nobody waits for then
            rows.counts[:1].zero_()
            step._rows = rows._replace(tiles=torch.full_like(rows.tiles, -1))

    patched.__init__ = begin
    try:
        yield
    finally:
        patched.__init__ = before


def added_us(scene: Scene, chosen: dict[Projection, Way], mix: Mix, base_us: float) -> float:
    """Return what adapters add to a layer."""
    if scene.model.device.type != "cuda":
        return 0.0
    with launched(scene, chosen):
        return (scene.us_of(*mix) - base_us) / scene.layers


def tried(
    scene: Scene, chosen: dict[Projection, Way], projection: Projection, mix: Mix, base_us: float
) -> float | None:
    """Compare the way of one projection with plain products and time all; return what they add to a layer,
    if it is right.
    """
    way, found_us = chosen[projection], 0.0
    try:
        with launched(scene, chosen):
            error = scene.largest_error(projection, *mix)
        found_us = added_us(scene, chosen, mix, base_us)
    except Exception as failure:  # noqa: BLE001 - of what does not fit the device, the reason
        log(projection=projection.name, way=str(way), error=str(failure).splitlines()[:1])
        return None
    right = error <= TOLERANCE[scene.model.dtype]
    log(projection=projection.name, way=str(way), added_us=round(found_us, 2), error=f"{error:.1e}",
        right=right)  # fmt: skip
    return found_us if right else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.adapter_products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a config.json")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--mixes", default="8x8,64x32,64x8", help="rows x adapters")
    parser.add_argument("--seconds", type=float, default=80.0, help="nothing more is tried after so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    began_s = time.perf_counter()
    if not Path(asked.model).is_dir():
        parser.error(f"no folder {asked.model}")
    scene = Scene(asked.model, asked.device, asked.layers, asked.rank)
    device = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    log(
        model=asked.model,
        device=device,
        torch=torch.__version__,
        start_s=round(time.perf_counter() - began_s, 1),
    )
    mixes = [Mix(*map(int, mix.split("x"))) for mix in asked.mixes.split(",")]
    for number, mix in enumerate(mixes):
        part = (asked.seconds - (time.perf_counter() - began_s)) / (len(mixes) - number)
        run(scene, mix, time.perf_counter() + part)
    log(seconds=round(time.perf_counter() - began_s, 1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
