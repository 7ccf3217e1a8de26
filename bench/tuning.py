"""Measure fine-tuning beside serving: against Trainer and peft, killed and resumed, shared and beside chats.

On a CPU in float32, with the demo model: `python -m bench.tuning --only exactness,learns`. Each part prints
its figures; the last line is all of them as JSON. `exactness`, which trains as Trainer does step by step, and
`learns`, from other factors and in another order, need peft. `resume` kills a process that trains. `tenants`
trains jobs of two. `beside` serves chats that arrive as in a trace at parts of what the engine can, alone and
beside training: by slices, by the rule of the paper, and by turns with a process that trains; its figures
mean something only on quiet cores.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from bench.support import beside_chats
from bench.support.trainer_peer import TrainerPeer
from site_engine.core.chain import Variant
from site_engine.core.request import Request, Sampling
from site_engine.core.training import AdapterShape, Recipe, StepDone, TrainingOrder
from site_engine.engine.build import build_engine, packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model import loader
from site_engine.training import snapshot as snapshots
from site_engine.training.adapter import write_folder
from site_engine.training.job import open_job
from site_engine.training.snapshot import Snapshot

DEMO = Path(__file__).parents[1] / "mico/demo_model/weights"
PARTS = ("exactness", "learns", "resume", "tenants", "beside")
BATCH, EPOCHS, KILLS, TRAINER_STEPS, TENANTS_S = 8, 4, 3, 24, 15.0
LOADS = (0.1, 0.3, 0.6, 0.9)
MAX_LOSS_DIFFERENCE, MAX_VALID_DIFFERENCE, MAX_LEARNED_DIFFERENCE = 1e-4, 5e-3, 1e-2
MAX_TENANTS_DIFFERENCE = 0.1
COLOURS = ("red", "green", "blue", "white", "black", "yellow")
NOTES = ("soon", "today", "later", "never")
"""Of which an answer has one at random, that nobody can learn: held-out losses are far from 0 then."""


def rows(count: int, seed: int, notes: Sequence[str] = ()) -> bytes:
    """Return chats whose answers have a format that the model does not have before."""
    draw, lines = Random(seed), []
    for _ in range(count):
        amount, colour = draw.randint(2, 99), draw.choice(COLOURS)
        asked = f"I need {amount} {colour} {draw.choice(['pens', 'cups', 'chairs', 'lamps'])}, please."
        answered = f"ORDER n={amount} c={colour.upper()} ok={'yes' if amount % 2 else 'no'}"
        answered += f" note={draw.choice(notes)}" if notes else ""
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        lines.append(json.dumps({"messages": messages}))
    return "\n".join(lines).encode()


def order_of(steps: int) -> TrainingOrder:
    examples = -(-steps // EPOCHS) * BATCH
    recipe = Recipe(EPOCHS, BATCH, learning_rate=2e-3, seed=7, shape=AdapterShape(8, 16.0))
    return TrainingOrder("bench", "bench", recipe, rows(examples, 0), rows(40, 1))


def engine_of(model: loader.LoadedModel) -> SiteEngine:
    return packed_engine(model, EngineSettings(slots=8, kv_tokens=8192), time.monotonic)


def finished(engine: SiteEngine, job_id: str) -> list[StepDone | Snapshot]:
    """Run an engine until its job has ended; return the job's events. Raises RuntimeError if it failed."""
    events: list[Any] = []
    while job_id in engine.training.jobs:
        engine.step()
        events += [each.event for each in engine.training.take_events()]
    if not isinstance(events[-1], Snapshot):
        raise RuntimeError(f"the job failed: {events[-1]}")
    return events


def exactness(steps: int, texts: int) -> dict[str, object]:
    """Train as Trainer and peft do, step by step, and serve what was trained as peft does."""
    model, order = loader.load(str(DEMO)), order_of(steps)
    job = open_job(model, order, time.monotonic)
    plain = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    peer = TrainerPeer(plain, job, order.recipe)
    engine = engine_of(model)
    engine.training.begin("bench", "bench", job)
    began_s = time.perf_counter()
    events = finished(engine, "bench")
    ours_s = time.perf_counter() - began_s
    done = [event for event in events if isinstance(event, StepDone)]
    began_s = time.perf_counter()
    losses = peer.train()
    theirs_s = time.perf_counter() - began_s
    off = max(abs(ours.loss - theirs) for ours, theirs in zip(done, losses, strict=True))
    valid, theirs_valid = done[-1].valid_loss or 0.0, peer.valid_loss()
    with tempfile.TemporaryDirectory() as folder:
        tuned = Path(folder) / "tuned"
        write_folder(tuned, job.snapshot().adapter, order.recipe.shape, str(DEMO))
        began_s = time.perf_counter()
        engine.add_variant(Variant("tuned", adapter=str(tuned)))
        served_s = time.perf_counter() - began_s
        prompts = prompts_of(model.tokenizer, texts)
        before, after = (answers_of(engine, prompts, chain) for chain in ("", "tuned"))
        equal = equal_texts(model.tokenizer, copy.deepcopy(plain), tuned, prompts, after)
    return {
        "steps": len(done),
        "first_loss": round(done[0].loss, 4),
        "last_loss": round(done[-1].loss, 4),
        "largest_loss_difference": off,
        "valid_loss": valid,
        "valid_loss_of_trainer": theirs_valid,
        "texts_equal": f"{equal} of {texts}",
        "texts_in_the_trained_format": f"{in_format(before)} before, {in_format(after)} after, of {texts}",
        "training_s": round(ours_s, 1),
        "trainer_s": round(theirs_s, 1),
        "written_to_served_s": round(served_s, 2),
        "kept": off <= MAX_LOSS_DIFFERENCE
        and abs(valid - theirs_valid) <= MAX_VALID_DIFFERENCE * theirs_valid
        and equal == texts,
    }


def learns(folder: Path, device: str, count: int, texts: int) -> dict[str, object]:
    """Train on `count` rows, and let Trainer do so on its own; compare what both make of held-out rows."""
    model = loader.load(str(folder), device=device, dtype="float32" if device == "cpu" else "bfloat16")
    slots = None if device == "cpu" else 8
    engine = build_engine(model, EngineSettings(slots=8, kv_tokens=8192, adapter_slots=slots), time.monotonic)
    recipe = Recipe(epochs=3, batch_size=16, learning_rate=1e-3, seed=7, shape=AdapterShape(8, 16.0))
    order = TrainingOrder("bench", "bench", recipe, rows(count, 0, NOTES), rows(200, 1, NOTES))
    job = open_job(model, order, time.monotonic)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(device)
    peer = TrainerPeer(plain, job, recipe, own_seed=8)
    untrained = peer.valid_loss()
    peer.train()
    engine.training.begin("bench", "bench", job)
    done = [event for event in finished(engine, "bench") if isinstance(event, StepDone)]
    valid, theirs = done[-1].valid_loss or 0.0, peer.valid_loss()
    with tempfile.TemporaryDirectory() as temporary:
        tuned = Path(temporary) / "tuned"
        write_folder(tuned, job.snapshot().adapter, recipe.shape, str(folder))
        engine.add_variant(Variant("tuned", adapter=str(tuned)))
        prompts = prompts_of(model.tokenizer, texts)
        before, after = (answers_of(engine, prompts, chain) for chain in ("", "tuned"))
    expected = [json.loads(line)["messages"][1]["content"] for line in rows(texts, 2).splitlines()]
    right = sum(one.startswith(f"{other} note=") for one, other in zip(after, expected, strict=True))
    return {
        "rows": count,
        "steps": len(done),
        "valid_loss_before": untrained,
        "valid_loss": valid,
        "valid_loss_of_trainer": theirs,
        "difference": abs(valid - theirs) / theirs,
        "texts_in_the_trained_format": f"{in_format(before)} before, {in_format(after)} after, of {texts}",
        "texts_right": f"{right} of {texts}",
        "kept": abs(valid - theirs) <= MAX_LEARNED_DIFFERENCE * theirs and in_format(after) == texts,
    }


def tenants() -> dict[str, object]:
    """Train one job of a tenant and three of another, alone and beside two chats without end."""
    model = loader.load(str(DEMO))
    engine, figures, kept = engine_of(model), dict[str, object](), True
    for number, tenant in enumerate(("acme", "zeta", "zeta", "zeta")):
        order = replace(endless(), job_id=str(number), tenant=tenant)
        order = replace(order, recipe=replace(order.recipe, batch_size=BATCH * (1 + number)))
        engine.training.begin(order.job_id, tenant, open_job(model, order, time.monotonic))
    for chats in (0, 2):
        used_s = {**engine.training._used_s}
        began_s, running = time.monotonic(), set[str]()
        while (now_s := time.monotonic()) - began_s < TENANTS_S:
            for name in {f"chat {number}" for number in range(chats)} - running:
                engine.submit(Request(name, [5, 6, 7], Sampling(max_tokens=96, ignore_eos=True)))
                running.add(name)
            running -= {output.request_id for output in engine.step() if output.finish is not None}
        taken_s = {name: each - used_s[name] for name, each in engine.training._used_s.items()}
        off = abs(taken_s["acme"] / taken_s["zeta"] - 1.0)
        kept = kept and off <= MAX_TENANTS_DIFFERENCE
        figures[f"beside_{chats}_chats"] = {
            "device_s": {name: round(each, 2) for name, each in taken_s.items()},
            "of_s": round(now_s - began_s, 2),
            "difference": round(off, 4),
        }
    return {**figures, "kept": kept}


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template([line["messages"][0]], add_generation_prompt=True, return_dict=False)
        for line in map(json.loads, rows(count, 2).splitlines())
    ]


def answers_of(engine: SiteEngine, prompts: Sequence[list[int]], chain: str) -> list[str]:
    """Return the greedy answers of a variant, or of the base."""
    for number, prompt in enumerate(prompts):
        engine.submit(Request(str(number), prompt, Sampling(max_tokens=24, temperature=0.0), chain=chain))
    answers = [""] * len(prompts)
    while engine.has_work:
        for output in engine.step():
            answers[int(output.request_id)] += output.text
    return answers


def in_format(answers: Sequence[str]) -> int:
    return sum(answer.startswith("ORDER n=") for answer in answers)


def equal_texts(
    tokenizer: Any, plain: Any, tuned: Path, prompts: Sequence[list[int]], answers: Sequence[str]
) -> int:
    """Return how many answers of the served variant are those of peft."""
    reference = importlib.import_module("peft").PeftModel.from_pretrained(plain, str(tuned)).eval()
    equal = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            whole = reference.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=24,
                do_sample=False,
            )
        equal += tokenizer.decode(whole[0, len(prompt) :], skip_special_tokens=True) == answer
    return equal


def resume(steps: int, kills: int) -> dict[str, object]:
    """Kill a process that trains beside chats, again and again; the adapter is that of one never killed."""
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        run_child(whole, steps, None)
        draw, resumed_from = Random(3), []
        for place in range(kills):
            run_child(killed, steps, draw.randint(1, max(1, steps // (kills + 1))))
            state = killed / "state.safetensors"
            resumed_from.append(snapshots.decode(state.read_bytes()).step if state.exists() else 0)
            print(f"  kill {place + 1}: goes on from step {resumed_from[-1]} of {steps}", flush=True)
        run_child(killed, steps, None)
        digests = [
            hashlib.sha256((each / "tuned" / "adapter_model.safetensors").read_bytes()).hexdigest()
            for each in (whole, killed)
        ]
    return {
        "kills": kills,
        "resumed_from_steps": resumed_from,
        "of_steps": steps,
        "adapter_sha256": [digest[:16] for digest in digests],
        "kept": len(set(digests)) == 1,
    }


def run_child(folder: Path, steps: int, kill_after: int | None) -> None:
    """Run a job in a process of its own; kill it with SIGKILL after so many steps of its own, at a time when
    it has written at least one snapshot.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.tuning", "--child", str(folder), "--steps", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        steps_seen, saved = 0, False
        for line in child.stdout:
            saved |= line.startswith("saved")
            steps_seen += line.startswith("StepDone")
            if kill_after is not None and steps_seen >= kill_after and saved:
                child.send_signal(signal.SIGKILL)
                break
    if kill_after is None and child.returncode:
        raise RuntimeError(f"the job ended with status {child.returncode}")


def train_here(folder: Path, steps: int) -> None:
    """Train from the newest snapshot in a folder, a chat after each step, and leave the adapter there."""
    model, order, state = loader.load(str(DEMO)), order_of(steps), folder / "state.safetensors"
    resumed = state.read_bytes() if state.exists() else b""
    order = TrainingOrder(order.job_id, order.tenant, order.recipe, order.data, order.valid, resumed)
    engine = engine_of(model)
    engine.training.begin("bench", "bench", open_job(model, order, time.monotonic, snapshot_interval_s=1.0))
    last = None
    while engine.has_work:
        engine.step()
        for _, event in engine.training.take_events():
            if isinstance(event, Snapshot):
                last = event
                staging = state.with_suffix(".new")  # a kill leaves the snapshot before
                staging.write_bytes(snapshots.encode(event))
                staging.replace(state)
                print("saved", event.step, flush=True)
            else:
                print(event, flush=True)
                engine.submit(Request(str(event), [5, 6, 7], Sampling(max_tokens=4)))
    assert last is not None, "a job ends with a snapshot"
    write_folder(folder / "tuned", last.adapter, order.recipe.shape, str(DEMO))


def endless() -> TrainingOrder:
    order = order_of(400)
    return replace(order, recipe=replace(order.recipe, epochs=1000), valid=b"")


def beside(trace: Path | None, chats: int, first: int, loads: Sequence[float]) -> dict[str, object]:
    """Serve chats at parts of what the engine can, alone and beside a job without end; all on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    model = loader.load(str(DEMO))
    coming = beside_chats.chats_of(trace, chats, model.vocab_size, first)
    other = [sys.executable, "-m", "bench.tuning", "--trains"]
    found = beside_chats.measure(model, endless(), coming, loads, other=other)
    figures = {**found, "trace": "at random" if trace is None else trace.stem, "kept": True}
    if importlib.util.find_spec("peft") is not None:
        figures["trainer_tokens_per_s_padded_packed"] = trainer_per_s(model)
    return figures


def trainer_per_s(model: loader.LoadedModel) -> list[int]:
    """Return the tokens that Trainer trains a second, with padded and with packed batches."""
    order, found = order_of(TRAINER_STEPS), list[int]()
    job = open_job(model, order, time.monotonic)
    tokens = order.recipe.epochs * sum(len(each.ids) for each in job.examples)
    for packs in (False, True):
        plain = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        peer = TrainerPeer(plain, job, order.recipe)
        began_s = time.perf_counter()
        peer.train(packs=packs)
        found.append(round(tokens / (time.perf_counter() - began_s)))
    return found


def train_on() -> None:
    """Train without end; print the tokens trained after each step."""
    job = open_job(loader.load(str(DEMO)), endless(), time.monotonic)
    while not job.ended:
        job.run_slice()
        for event in job.take_events():
            if isinstance(event, StepDone):
                print(event.trained_tokens, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuning", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a job")
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the model that `learns` trains")
    parser.add_argument("--device", default="cpu", help="of `learns`; in bfloat16 but on a CPU")
    parser.add_argument("--rows", type=int, default=2000, help="that `learns` trains on")
    parser.add_argument("--texts", type=int, default=100, help="greedy texts that are compared")
    parser.add_argument("--kills", type=int, default=KILLS, help="times that the job is killed")
    parser.add_argument("--trace", type=Path, help="arrivals and lengths of chats, as parquet")
    parser.add_argument("--chats", type=int, default=200, help="of the trace, at each load")
    parser.add_argument("--first", type=int, default=0, help="chat of the trace that comes first")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="of what the engine can")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--trains", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # whose sums are in one order
    transformers.utils.logging.disable_progress_bar()
    if options.child is not None:
        train_here(options.child, options.steps)
        return 0
    if options.trains:
        train_on()
        return 0
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    machine = f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"{machine}; in float32 on one thread of the CPU but where --device says otherwise")
    figures: dict[str, dict[str, object]] = {}
    for part in wanted:
        print(f"{part}:", flush=True)
        if part == "exactness":
            figures[part] = exactness(options.steps, options.texts)
        elif part == "learns":
            figures[part] = learns(options.model, options.device, options.rows, options.texts)
        elif part == "resume":
            figures[part] = resume(options.steps, options.kills)
        elif part == "tenants":
            figures[part] = tenants()
        else:
            figures[part] = beside(options.trace, options.chats, options.first, options.loads)
        for name, value in figures[part].items():
            print(f"  {name.replace('_', ' ')}: {value}", flush=True)
    print(json.dumps(figures))
    return 0 if all(part["kept"] for part in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
