"""Measure fine-tuning on one GPU with random weights: gradients, tokens a second alone and beside chats.

`python -m bench.tuning_gpu --shape bench/models/qwen2.5-0.5b --only gradients,alone,beside`. Gradients of the
16-bit model are compared with those of the same weights in float32, taken by PyTorch through the whole
unpacked model. `trainer` trains as many rows a step with Trainer and peft, padded and packed; it needs peft.
Each part prints its figures; the last line is all of them as JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import transformers

from bench.engine_gpu import plain_model
from bench.support.trainer_peer import TrainerPeer
from site_engine.core.loader_turns import LoaderTurns
from site_engine.core.request import Request, Sampling
from site_engine.core.slack import Bounds
from site_engine.core.training import AdapterShape, Failed, Recipe, StepDone
from site_engine.engine.build import build_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, from_model
from site_engine.process_settings import set_up_collector, set_up_process
from site_engine.training import snapshot as snapshots
from site_engine.training.adapter import attach, new_adapter, target_modules
from site_engine.training.data import Dataset, Example
from site_engine.training.micro_batch import run_micro_batch
from site_engine.training.packing import pack
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.trainer import Trainer

T = TypeVar("T")
PARTS = ("gradients", "alone", "beside", "trainer")
SHAPE = AdapterShape(16, 32.0)
BETWEEN_S = 0.02
MAX_GRADIENT_ERROR = 2e-2
"""Of the norm of all gradients: rounding to bfloat16 gave 3e-3 on a small model."""
EXACT_ERROR = 1e-4
PRODUCTS_S = 3.0


def examples(count: int, vocabulary: int, longest: int, seed: int) -> list[Example]:
    """Return sequences of random tokens, of which the second half is learned."""
    draw = Random(seed)
    made = []
    for _ in range(count):
        length = max(8, min(longest, int(draw.lognormvariate(5.2, 0.6))))
        ids = np.array([draw.randrange(vocabulary) for _ in range(length)], dtype=np.int64)
        made.append(Example(ids, np.arange(length) >= length // 2))
    return made


def data_of(model: LoadedModel, rows: int) -> Dataset:
    return Dataset(tuple(examples(rows, model.vocab_size, model.context_tokens, seed=1)))


def trainer_of(engine: SiteEngine, model: LoadedModel, data: Dataset, batch: int) -> Trainer:
    tokens = engine.training._train_tokens
    trainer = Trainer(
        SlicedModel(model.model),
        data,
        Recipe(epochs=50, batch_size=batch, shape=SHAPE),
        about={},
        clock=time.perf_counter,
        train_tokens=tokens or 64,
        padded=tokens is not None,
        costs=engine.training._costs_of(SHAPE),
    )
    trainer.warm_up()
    return trainer


# ---- gradients


def whole_gradients(plain: Any, factors: Any, batch: Sequence[Example], count: int) -> list[torch.Tensor]:
    """Return the gradients by PyTorch through a whole model, one sequence after the other, in its dtype."""
    layers = [(f"model.layers.{number}", layer) for number, layer in enumerate(plain.model.layers)]
    modules = target_modules(layers, SHAPE)
    adapter = new_adapter(modules, SHAPE, seed=0)
    for name, pair in adapter.factors.items():
        for factor, wanted in zip(pair, factors[name], strict=True):
            factor.data = wanted.detach().to(factor.dtype).clone()
        attach(name, modules[name], adapter)
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    for example in batch:
        ids = torch.from_numpy(example.ids).to(plain.device)
        learned = torch.from_numpy(example.learned).to(plain.device).nonzero()[:, 0]
        logits = plain(input_ids=ids[None], use_cache=False).logits[0, learned - 1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[learned], reduction="sum") / count
        for parameter, found in zip(
            adapter.parameters(), torch.autograd.grad(loss, adapter.parameters()), strict=True
        ):
            parameter.grad = found if parameter.grad is None else parameter.grad + found
    return [parameter.grad for parameter in adapter.parameters() if parameter.grad is not None]


def sliced_gradients(
    model: SlicedModel, batch: Sequence[Example], count: int
) -> tuple[Any, list[torch.Tensor]]:
    """Return the factors, of which `up` is not zero, and the gradients by slices, packed."""
    adapter = new_adapter(model.targets(SHAPE), SHAPE, seed=0)
    draw = torch.Generator(model.device).manual_seed(1)
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.normal_(0.0, 0.02, generator=draw)
    slices = run_micro_batch(model, adapter, model.attach(adapter), pack(batch), count)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return adapter.factors, ended.value.gradients


def error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference, relative to the norm."""
    off = sum(
        float((one.float() - other.float()).square().sum()) for one, other in zip(found, wanted, strict=True)
    )
    whole = sum(float(other.float().square().sum()) for other in wanted)
    return float((off / whole) ** 0.5)


def gradients(plain: Any, layers: int) -> dict[str, object]:
    """Compare the gradients of the first layers of a model, packed in slices, with PyTorch's in float32."""
    small = copy.deepcopy(plain)
    small.config.num_hidden_layers = layers
    small.model.layers = small.model.layers[:layers]
    exact = copy.deepcopy(small).float()
    rounded = copy.deepcopy(small)
    batch = examples(12, small.config.vocab_size, 512, seed=2)
    count = sum(int(each.learned.sum()) for each in batch)
    factors, ours = sliced_gradients(SlicedModel(from_model(small, eos_token_ids=()).model), batch, count)
    wanted = whole_gradients(exact, factors, batch, count)
    theirs = whole_gradients(rounded, factors, batch, count)
    off, unpacked = error(ours, wanted), error(theirs, wanted)
    limit = EXACT_ERROR if plain.dtype == torch.float32 else max(MAX_GRADIENT_ERROR, 1.5 * unpacked)
    return {
        "layers": layers,
        "error_packed_in_slices": off,
        "error_of_pytorch_in_16_bits_unpacked": unpacked,
        "kept": off <= limit,
    }


# ---- tokens a second


def gemm_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the measured FLOP/s of large products at best, and on average of the second half of PRODUCTS_S:
    a GPU at its limit of power, as in training, computes more slowly than for an instant.
    """
    size, seconds = (8192, PRODUCTS_S) if device.type == "cuda" else (512, 0.1)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    taken_s = list[float]()
    while sum(taken_s) < seconds:
        wait(device)
        began_s = time.perf_counter()
        for _ in range(4):
            one @ other
        wait(device)
        taken_s.append(time.perf_counter() - began_s)
    flop = 4 * 2 * size**3
    return flop / min(taken_s), flop / statistics.fmean(taken_s[len(taken_s) // 2 :])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ran(NamedTuple):
    trained_per_s: float  # tokens, between the first and the last optimizer step
    decoded_per_s: float
    between_s: list[float]  # two tokens

    def between_ms(self) -> list[float]:
        """Return the median, the 99th percentile and the longest."""
        marks = statistics.quantiles(self.between_s, n=100) if len(self.between_s) > 1 else [0.0] * 99
        return [round(1000 * each, 2) for each in (marks[49], marks[98], max(self.between_s, default=0.0))]


def run_while(
    engine: SiteEngine,
    goes_on: Callable[[float], bool],
    ended: Callable[[str], None] = lambda name: None,
    stepped: Callable[[], None] = lambda: None,
) -> Ran:
    """Step an engine while `goes_on` after so many seconds, and tell the names of requests that end.

    `stepped` is called after each step.
    """
    engine.training.take_events()
    begin = end = time.perf_counter()
    steps: list[tuple[float, int]] = []  # the end of each optimizer step, and the tokens trained by then
    decoded, token_s, between = 0, begin, list[float]()
    while goes_on(end - begin):
        outputs = engine.step()
        end = time.perf_counter()
        if outputs:
            between.append(end - token_s)
            decoded, token_s = decoded + len(outputs), end
        for output in outputs:
            if output.finish is not None:
                ended(output.request_id)
        for event in (each.event for each in engine.training.take_events()):
            if isinstance(event, Failed):
                raise RuntimeError(event.reason)
            steps += [(end, event.trained_tokens)] if isinstance(event, StepDone) else []
        stepped()
    trained_per_s = 0.0
    if len(steps) > 1:
        (first_s, first), (last_s, last) = steps[0], steps[-1]
        trained_per_s = (last - first) / (last_s - first_s)
    return Ran(trained_per_s, decoded / (end - begin), between[1:])


def slices_ms(job: Trainer) -> dict[str, dict[int, float]]:
    """Return what slices of a job take, as foreseen, by kind and tokens."""
    return {
        kind: {size: round(1000 * seconds, 2) for size, seconds in sorted(by_size.items())}
        for kind, by_size in job._costs._usual_s.items()
    }


def done_beside(
    engine: SiteEngine, act: Callable[[], T], ended: Callable[[str], None]
) -> tuple[T, dict[str, object]]:
    """Do something in turns with the iterations of an engine, as a site opens and saves jobs.

    Also returns how long it took, and what was between tokens meanwhile.
    """
    turns, made = LoaderTurns(), list[T]()
    began_s = time.perf_counter()
    with ThreadPoolExecutor(1) as loader:
        doing = loader.submit(turns.run, lambda: made.append(act()))
        ran = run_while(engine, lambda _: not doing.done(), ended, turns.give)
    doing.result()
    took = {"s": round(time.perf_counter() - began_s, 2), "between_ms_p50_p99_most": ran.between_ms()}
    return made[0], took


def alone(engine: SiteEngine, model: LoadedModel, seconds: float, batch: int) -> dict[str, object]:
    """Train with nothing beside it, after half as long to warm up."""
    began_s = time.perf_counter()
    job = trainer_of(engine, model, data_of(model, 64 * batch), batch)
    opened_s = time.perf_counter() - began_s
    engine.training.begin("job", "acme", job)
    run_while(engine, lambda ran_s: ran_s < seconds / 2)
    per_s = run_while(engine, lambda ran_s: ran_s < seconds).trained_per_s
    micro_tokens = job.train_tokens
    engine.training.stop("job")
    layers = sum(each.numel() for each in model.model.model.layers.parameters())
    head = (
        model.model.lm_head.weight.numel() / 2
    )  # half of the tokens are learned, and no layer is computed again
    flops_per_token = 6 * layers + 4 * head
    best, lasting = (flops / flops_per_token for flops in gemm_flops(model.device, model.dtype))
    return {
        "tokens_per_s": round(per_s),
        "gemm_tflops_best_lasting": [round(each * flops_per_token / 1e12, 1) for each in (best, lasting)],
        "roofline_tokens_per_s_best_lasting": [round(best), round(lasting)],
        "share_of_roofline_best_lasting": [round(per_s / each, 3) for each in (best, lasting)],
        "micro_batch_tokens": micro_tokens,
        "opened_s": round(opened_s, 2),
        "slices_ms": slices_ms(job),
        "kept": per_s / lasting >= 0.8 or model.device.type == "cpu",
    }


def beside(
    engine: SiteEngine, model: LoadedModel, seconds: float, batch: int, rows: int, *, room: int
) -> dict[str, object]:
    """Decode rows without end, first alone, then beside training; a row at its end begins anew."""
    draw = Random(3)

    def chat(name: str) -> None:
        prompt = [draw.randrange(10, model.vocab_size) for _ in range(64)]
        most = min(engine.limit_tokens, room) - len(prompt) - 1  # so that all rows have a place
        engine.submit(Request(name, prompt, Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)))

    found: dict[str, object] = {"rows": rows, "slots": engine.settings.slots, "bound_ms": 1000 * BETWEEN_S}
    for name in ("alone", "trained"):
        for number in range(rows):
            chat(f"{name} {number}")
        run_while(engine, lambda ran_s: ran_s < seconds / 4, chat)
        if name == "trained":
            data = data_of(model, 64 * batch)
            job, found["opened"] = done_beside(engine, partial(trainer_of, engine, model, data, batch), chat)
            engine.training.begin("job", "acme", job)
            first = run_while(engine, lambda ran_s: ran_s < seconds / 2, chat)
            found["first_half_between_ms_p50_p99_most"] = first.between_ms()
            found["first_half_trained_tokens_per_s"] = round(first.trained_per_s)
            snapshot = job.snapshot()
            saved, found["saved"] = done_beside(engine, partial(snapshots.encode, snapshot), chat)
            found["saved_mb"] = len(saved) // 1_000_000
        ran = run_while(engine, lambda ran_s: ran_s < seconds, chat)
        found |= {
            f"{name}_decoded_per_s": round(ran.decoded_per_s),
            f"{name}_between_ms_p50_p99_most": ran.between_ms(),
            f"{name}_trained_tokens_per_s": round(ran.trained_per_s),
        }
        for number in range(rows):
            engine.cancel(f"{name} {number}")
        engine.training.stop("job")
        while engine.has_work:
            engine.step()
    found["micro_batch_tokens"], found["slices_ms"] = job.train_tokens, slices_ms(job)
    kept = ran.between_ms()[1] <= 1050 * BETWEEN_S and ran.trained_per_s > 0.0
    return {**found, "kept": kept or model.device.type == "cpu"}


def trainers(plain: Any, batch: int, longest: int, steps: int, parts: int) -> dict[str, object]:
    """Train steps of `batch` rows with Trainer and peft, in so many micro-batches a step, after one as long
    to warm up.
    """
    data = Dataset(tuple(examples(steps * batch, plain.config.vocab_size, longest, seed=1)))
    recipe = Recipe(epochs=1, batch_size=batch, shape=SHAPE)
    job = Trainer(SlicedModel(plain), data, recipe, about={}, clock=time.perf_counter, train_tokens=64)
    found: dict[str, object] = {"steps": steps, "micro_batches_of_a_step": parts, "kept": True}
    tokens = sum(len(each.ids) for each in data.examples)
    for packs in (False, True):
        peer = TrainerPeer(plain, job, recipe)
        peer.train(packs=packs, parts=parts)
        began_s = time.perf_counter()
        losses = peer.train(packs=packs, parts=parts)
        name = "packed" if packs else "padded"
        found[f"{name}_tokens_per_s"] = round(tokens / (time.perf_counter() - began_s))
        found[f"{name}_last_loss"] = round(losses[-1], 3)
        del peer
        gc.collect()
    return found


def engine_of(model: LoadedModel, rows: int, slots: int, room: int) -> SiteEngine:
    settings = EngineSettings(
        slots=max(rows, slots),
        kv_tokens=(rows + 2) * room,
        token_budget=max(512, rows, slots),
        adapter_slots=8 if model.device.type == "cuda" else None,
        training=Bounds(between_tokens_s=BETWEEN_S),
        max_pending=1024,
    )
    return build_engine(model, settings, time.perf_counter)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuning_gpu", description=__doc__)
    parser.add_argument("--shape", type=Path, required=True, help="folder of a config.json")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--batch", type=int, default=64, help="rows of an optimizer step")
    parser.add_argument("--rows", type=int, default=16, help="chats at once")
    parser.add_argument("--slots", type=int, default=256, help="of which chats leave free what training has")
    parser.add_argument("--layers", type=int, default=4, help="of the model whose gradients are compared")
    parser.add_argument("--steps", type=int, default=8, help="that Trainer is timed for")
    parser.add_argument("--parts", type=int, default=4, help="micro-batches of a step of Trainer")
    parser.add_argument("--tf32", action="store_true", help="compute adapters with 10 bits of fraction")
    options = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    set_up_process()  # as a site does
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = plain_model(str(options.shape), device)
    print(f"{options.shape.name} on {device}, torch {torch.__version__}, tf32 {options.tf32}", flush=True)
    figures: dict[str, dict[str, object]] = {}
    wanted = options.only.split(",")
    if "gradients" in wanted:
        show(figures, "gradients", gradients(plain, options.layers))
        gc.collect()
    if "trainer" in wanted:  # before a site's engine changes the layers of the model
        longest = plain.config.max_position_embeddings
        show(figures, "trainer", trainers(plain, options.batch, longest, options.steps, options.parts))
    if {"alone", "beside"} & set(wanted):
        model = from_model(plain, eos_token_ids=())
        room = min(model.context_tokens, 4096) if device == "cuda" else 256
        began_s = time.perf_counter()
        engine = engine_of(model, options.rows, options.slots, room)
        print(f"built in {time.perf_counter() - began_s:.1f} s", flush=True)
        began_s = time.perf_counter()
        engine.training.warm_up()  # as a site does before it joins
        print(f"warmed up in {time.perf_counter() - began_s:.1f} s", flush=True)
        set_up_collector()
        if "beside" in wanted:
            show(
                figures,
                "beside",
                beside(engine, model, options.seconds, options.batch, options.rows, room=room),
            )
        if "alone" in wanted:
            show(figures, "alone", alone(engine, model, options.seconds, options.batch))
    print(json.dumps(figures))
    return 0 if all(part["kept"] for part in figures.values()) else 1


def show(figures: dict[str, dict[str, object]], part: str, found: dict[str, object]) -> None:
    figures[part] = found
    print(
        f"{part}:",
        *(f"  {name.replace('_', ' ')}: {value}" for name, value in found.items()),
        sep="\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
