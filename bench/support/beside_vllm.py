"""Have vLLM serve the same queries in a process of its own, and read what it took.

vLLM may lie in a folder that only that process has on its path. Passes are told as they end; what goes wrong
is one line of the results, and the passes until then count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
WITHIN_S = 540.0
LOOK_EVERY_S = 0.2
LOG_CHARS = 5_000
BLOCK_TOKENS = 16
SETTLED_TOKENS = 16
"""Of every answer, before its steps count: all rows decode then."""
STEP_ROUNDS = 3
PART_OF_MEMORY = 0.5
"""Of a device, where room for keys and values is limited otherwise: enough for 8B on 80 GB."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # would ask for NVLink multicast
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
ERROR = re.compile(r"\b\w*(?:Error|Exception): \S.*")
CONSEQUENCES = ("initialization failed", "EngineDeadError")


class Pass(NamedTuple):
    """Queries that are asked at once: token ids, tokens of each answer, each one's adapter from 1, 0 none."""

    name: str
    prompts: list[list[int]]
    tokens: list[int]
    adapters: Sequence[int] = ()


class Took(NamedTuple):
    seconds: float
    cached_tokens: int


class Served(NamedTuple):
    """What vLLM did until it ended: `error` is empty if that was all."""

    start_s: float
    kv_tokens: int
    passes: dict[str, list[Took]]
    error: str

    def figures(self) -> dict[str, Any]:
        """Return what is told of every run."""
        found: dict[str, Any] = {"start_s": round(self.start_s, 1), "kv_tokens": self.kv_tokens}
        return found | ({"error": self.error} if self.error else {})

    def step_ms(self, name: str, steps: int) -> float | None:
        """Return the milliseconds of a step of `step_passes`: of long answers, less those of short ones.

        Prompts, beginning and end drop out. None if a pass is missing.
        """
        short, long = (self.passes.get(f"{name} {kind}", []) for kind in ("short", "long"))
        if not short or not long:
            return None
        less, more = (statistics.median([each.seconds for each in some]) for some in (short, long))
        return (more - less) / steps * 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vllm-path", default="", help="folder of packages with vLLM, if not installed")
    parser.add_argument("--vllm-within", type=float, default=WITHIN_S, help="seconds until vLLM is ended")


class Results:
    """What the peer writes, told as it comes."""

    def __init__(self, path: Path, ended: Callable[[str, Took], None]) -> None:
        self.ready: dict[str, Any] = {"start_s": 0.0, "kv_tokens": 0}
        self.passes: dict[str, list[Took]] = {}
        self._path, self._read, self._ended = path, 0, ended

    def look(self) -> None:
        """Read the lines that are new and whole."""
        lines = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
        for line in lines[self._read :]:
            self._add(json.loads(line))
        self._read = len(lines)

    def _add(self, record: dict[str, Any]) -> None:
        if "name" not in record:
            self.ready = record
            print(f"vLLM: ready after {record['start_s']:.1f} s, {record['kv_tokens']} tokens", flush=True)
            return
        took = Took(record["seconds"], record["cached_tokens"])
        self.passes.setdefault(record["name"], []).append(took)
        print(f"vLLM: {record['name']}, {took.seconds:.3f} s", flush=True)
        self._ended(record["name"], took)


def step_passes(
    name: str, rows: int, *, prompt_tokens: int, steps: int, vocab_size: int, adapters: int = 0
) -> list[Pass]:
    """Return passes of rows with answers so many steps apart; each of `adapters` has as many of the rows."""
    draw = np.random.default_rng(rows)
    chosen = [1 + at * adapters // rows for at in range(rows)] if adapters else []
    kinds = [("warm", SETTLED_TOKENS), ("warm", SETTLED_TOKENS + steps)]
    kinds += [("short", SETTLED_TOKENS), ("long", SETTLED_TOKENS + steps)] * STEP_ROUNDS
    return [
        Pass(
            f"{name} {kind}",
            draw.integers(10, vocab_size, (rows, prompt_tokens)).tolist(),
            [tokens] * rows,
            chosen,
        )
        for kind, tokens in kinds
    ]


def limited(kv_tokens: int) -> dict[str, Any]:
    """Return arguments of an engine with room for so many tokens; one block is not used."""
    return {
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS + 1,
        "gpu_memory_utilization": PART_OF_MEMORY,
    }


def give_memory_back() -> None:
    """Free what nothing refers to on the devices. A context of some hundred MB stays."""
    gc.collect()
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
                free, whole = torch.cuda.mem_get_info()
            print(f"cuda:{device}: {free / 1e9:.1f} of {whole / 1e9:.1f} GB free", flush=True)


def serve(
    packages: str,
    model: Path,
    arguments: Mapping[str, Any],
    passes: Sequence[Pass],
    adapters: Sequence[str] = (),
    *,
    within_s: float = WITHIN_S,
    ended: Callable[[str, Took], None] = lambda name, took: None,
) -> Served:
    """Start vLLM with these arguments of its `LLM`, after our memory is free, and have it serve all passes.

    `model`: a folder with a configuration; `adapters`: folders as peft writes them; `ended`: called with each
    pass as it ends.
    """
    began_s = time.perf_counter()
    give_memory_back()
    with tempfile.TemporaryDirectory(prefix="mico-vllm-") as folder:
        work, lines, log = (Path(folder) / name for name in ("work.json", "results.jsonl", "log"))
        results = Results(lines, ended)
        work.write_text(
            json.dumps(
                {
                    "arguments": {"model": str(model.resolve()), **arguments},
                    "adapters": adapters,
                    "passes": [each._asdict() for each in passes],
                }
            )
        )
        prepared_s = time.perf_counter() - began_s
        print(f"vLLM: {len(passes)} passes written in {prepared_s:.1f} s, begins", flush=True)
        how = _run([str(work), str(lines)], packages, log, within_s, results.look)
        told = log.read_text(errors="replace")
    error = "" if how == "0" else error_of(told, how)
    if error:
        first = told[max(0, told.find("Traceback")) :][:LOG_CHARS]
        print(f"{first}\n[...]\n{told[-LOG_CHARS:]}", file=sys.stderr, flush=True)
    return Served(results.ready["start_s"], results.ready["kv_tokens"] or 0, results.passes, error)


def _run(
    arguments: Sequence[str], packages: str, log: Path, within_s: float, look: Callable[[], None]
) -> str:
    """Run the peer and return how it ended; look meanwhile; end whatever it has started."""
    path = [packages, str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.support.vllm_peer", *arguments],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment,
        )  # fmt: skip
    ends_s = time.perf_counter() + within_s
    try:
        while time.perf_counter() < ends_s:
            with suppress(subprocess.TimeoutExpired):
                return str(process.wait(LOOK_EVERY_S))
            look()
        return f"not done within {within_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        look()


def error_of(log: str, ended: str) -> str:
    """Return in one line why the peer ended: the last error of its log that is no consequence of another."""
    errors = [found.group() for line in log.splitlines() if (found := ERROR.search(line))]
    causes = [each for each in errors if not any(word in each for word in CONSEQUENCES)] or errors
    return f"{ended}: {causes[-1] if causes else 'no error in its log'}"
