"""How fast the engine is on one device, beside transformers' own ways of serving in the same run.

`python -m bench.engine --model FOLDER --workload alpaca --requests 64 --slots 32 --peer transformers-cb`
A folder with nothing but a config.json gets random weights. Greedy; every answer is as long as told; as many
queries are in flight as there are slots. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from bench.workload import SHAPES, Query, queries
from site_engine.engine import EngineSettings, SiteEngine
from site_engine.hf_bridge import LoadedModel, from_model
from site_engine.request import Request, Sampling

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


class Run(NamedTuple):
    """One pass over all queries; `answers` in their order, `step_ms` the median decode iteration if known."""

    seconds: float
    answers: list[list[int]]
    step_ms: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def load_plain(source: str, device: str, dtype: str) -> Any:
    """A model as transformers has it: real weights, or random ones in the shape of a config.json."""
    chosen = getattr(torch, dtype)
    if Path(source).is_dir() and not any(Path(source).glob("*.safetensors")):
        config = transformers.AutoConfig.from_pretrained(source)
        torch.manual_seed(0)
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=chosen).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=chosen).to(device).eval()


def run_mico(model: LoadedModel, work: list[Query], slots: int, token_budget: int, clock: Clock) -> Run:
    engine = SiteEngine(model, EngineSettings(slots=slots, token_budget=token_budget), clock)
    answers: list[list[int]] = [[] for _ in work]
    decode_s: list[float] = []
    began = clock()
    for at, query in enumerate(work):
        sampling = Sampling(max_tokens=query.response_tokens, temperature=0.0, ignore_eos=True)
        engine.submit(Request(str(at), query.prompt, sampling))
    while engine.has_work:
        step_began = clock()
        outputs = engine.step()
        if len(outputs) == slots:
            decode_s.append(clock() - step_began)
        for output in outputs:
            answers[int(output.request_id)] += output.token_ids
    seconds = clock() - began
    return Run(seconds, answers, statistics.median(decode_s) * 1e3 if decode_s else None)


def run_static(model: Any, work: list[Query], slots: int, token_budget: int, clock: Clock) -> Run:
    """`generate` on batches in order of arrival, padded on the left, each as long as its longest answer."""
    del token_budget
    answers: list[list[int]] = []
    began = clock()
    for first in range(0, len(work), slots):
        batch = work[first : first + slots]
        width = max(len(query.prompt) for query in batch)
        ids = torch.tensor([[0] * (width - len(query.prompt)) + query.prompt for query in batch])
        mask = torch.tensor([[0] * (width - len(query.prompt)) + [1] * len(query.prompt) for query in batch])
        longest = max(query.response_tokens for query in batch)
        with torch.inference_mode():
            whole = model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=longest,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[:, width:].tolist()
        answers += [ids_[: query.response_tokens] for ids_, query in zip(whole, batch, strict=True)]
    return Run(clock() - began, answers)


def run_continuous(model: Any, work: list[Query], slots: int, token_budget: int, clock: Clock) -> Run:
    """transformers' continuous batching, told the true length of every answer."""
    blocks = -(-slots * 1024 // 16)
    settings = transformers.ContinuousBatchingConfig(
        num_blocks=blocks, page_size=16, max_batch_tokens=max(token_budget, slots)
    )
    generation = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024
    )
    manager = model.init_continuous_batching(generation, settings)
    manager.start()
    answers: dict[str, list[int]] = {}
    waiting = enumerate(work)
    began = clock()
    for at, query in islice(waiting, slots):
        manager.add_request(query.prompt, str(at), max_new_tokens=query.response_tokens)
    while len(answers) < len(work):
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            answers[result.request_id] = list(result.generated_tokens)
            for at, query in islice(waiting, 1):
                manager.add_request(query.prompt, str(at), max_new_tokens=query.response_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended before its work")
    seconds = clock() - began
    manager.stop(block=True)
    return Run(seconds, [answers[str(at)] for at in range(len(work))])


PEERS: dict[str, Callable[[Any, list[Query], int, int, Clock], Run]] = {
    "transformers-static": run_static,
    "transformers-cb": run_continuous,
}


def same_answers(mine: Run, other: Run) -> float:
    """The share of queries answered with the very same tokens."""
    return sum(a == b for a, b in zip(mine.answers, other.answers, strict=True)) / len(mine.answers)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    plain = load_plain(options.model, options.device, options.dtype)
    served = from_model(copy.deepcopy(plain), name=Path(options.model).name)
    clock = CLOCKS[options.clock]
    mine: list[Run] = []
    others: dict[str, list[Run]] = {name: [] for name in options.peer}
    for repetition in range(options.repeat):
        work = queries(
            options.workload,
            options.requests,
            vocab_size=served.vocab_size,
            context_tokens=min(served.context_tokens, 2048),
            repetition=repetition,
        )
        mine.append(run_mico(served, work, options.slots, options.token_budget, clock))
        for name in options.peer:
            others[name].append(
                PEERS[name](copy.deepcopy(plain), work, options.slots, options.token_budget, clock)
            )
    speed = statistics.median(run.tokens_per_s for run in mine)
    peers = {name: statistics.median(run.tokens_per_s for run in runs) for name, runs in others.items()}
    steps = [run.step_ms for run in mine if run.step_ms is not None]
    return {
        "out_tok_s": round(speed, 1),
        "wall_s": round(statistics.median(run.seconds for run in mine), 3),
        "peers": {name: round(other, 1) for name, other in peers.items()},
        "ratio": {name: round(speed / other, 2) for name, other in peers.items()},
        "same_answers": {
            name: min(same_answers(*pair) for pair in zip(mine, runs, strict=True))
            for name, runs in others.items()
        },
        "step_ms": round(statistics.median(steps), 3) if steps else None,
        "conditions": _conditions(options),
    }


def _conditions(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("workload", "requests", "slots", "token_budget", "device", "dtype", "threads", "repeat", "clock")
    return {
        "model": Path(options.model).name,
        **{name: getattr(options, name) for name in kept},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": platform.machine(),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument(
        "--model", required=True, help="a folder, with weights or a config.json alone, or a Hub id"
    )
    parser.add_argument("--workload", choices=sorted(SHAPES), default="alpaca")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--slots", type=int, default=256, help="requests that run at once")
    parser.add_argument("--token-budget", type=int, default=8192, help="tokens of one iteration")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: on a shared machine")
    parser.add_argument("--peer", action="append", choices=sorted(PEERS), default=[])
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = measure(options)
    if not options.json:
        print(f"mico {found['out_tok_s']} tokens/s, a full decode step {found['step_ms']} ms")
        for name, speed in found["peers"].items():
            ratio, same = found["ratio"][name], found["same_answers"][name]
            print(f"{name} {speed} tokens/s: mico is {ratio} times as fast, {same:.0%} same answers")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
