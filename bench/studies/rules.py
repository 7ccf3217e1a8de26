"""Time an engine's steps in which a few rows have penalties, a grammar or log probabilities.

    python -m bench.studies.rules --model bench/models/qwen2.5-0.5b

Random weights, an engine alone, without HTTP. Kinds of rows take turns. Prints a JSON line for each kind: the
median, mean and fastest tenth of a step of all rows in milliseconds, and its parts that the host runs. Needs
a GPU; on a CPU, with TRITON_INTERPRET=1, it shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.studies.guided import grammar_of, large_tokenizer
from site_engine.core.request import Request, Sampling
from site_engine.cuda.llama_forward import llama_forward
from site_engine.cuda.ruled_rows import RuledRows
from site_engine.cuda.runner import DeviceRunner, DeviceStep
from site_engine.engine.build import overlapped_engine, warm_graphs
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.grammar_bitmask import GrammarBitmask
from site_engine.model.loader import from_model
from site_engine.process_settings import set_up_process
from site_engine.text.grammar import Grammars

RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "schema": {},
    "logprobs": {"logprobs": 5},
}
PARTS = ((RuledRows, "sample"), (GrammarBitmask, "allowed"), (DeviceRunner, "play"),
         (DeviceRunner, "launch"), (DeviceStep, "wait"), (SiteEngine, "_publish"))  # fmt: skip


class Parts:
    """Milliseconds of some methods, by name, while a step is timed."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {}
        for owner, name in PARTS:
            setattr(owner, name, self._timed(f"{owner.__name__}.{name}", getattr(owner, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **more: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*given, **more)
            finally:
                self.took.setdefault(name, []).append((time.perf_counter() - began_s) * 1e3)

        return timed

    def medians(self) -> dict[str, float]:
        found = {name: round(statistics.median(took), 3) for name, took in self.took.items()}
        self.took.clear()
        return found


def steps_ms(
    engine: SiteEngine, kind: str, asked: argparse.Namespace, grammar: Any, turn: int
) -> list[float]:
    for row in range(asked.rows):
        rules = RULES[kind] if row < asked.ruled else {}
        sampling = Sampling(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True, **rules)
        request = Request(f"{kind} {turn} {row}", [7 + row, 5, 9], sampling)
        if kind == "schema" and row < asked.ruled:
            request.grammar = grammar
        engine.submit(request)
    took = []
    while engine.has_work:
        began_s = time.perf_counter()
        if len(engine.step()) == asked.rows:
            took.append((time.perf_counter() - began_s) * 1e3)
    return took[2:]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a config.json")
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--ruled", type=int, default=2, help="rows that have rules")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    if not Path(asked.model).is_dir():
        parser.error(f"no folder {asked.model}")
    set_up_process()
    config = transformers.AutoConfig.from_pretrained(asked.model)
    if asked.layers:
        config.num_hidden_layers = asked.layers
        config.layer_types = config.layer_types[: asked.layers]
    torch.manual_seed(0)
    with torch.device(asked.device):
        dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = from_model(plain.eval().requires_grad_(False), eos_token_ids=())
    settings = EngineSettings(slots=asked.rows, kv_tokens=(asked.rows + 1) * 512, prefix_cache=False)
    engine = overlapped_engine(model, settings, time.perf_counter, llama_forward(model))
    if asked.device == "cuda":
        warm_graphs(engine)
    words = large_tokenizer(model.vocab_size - 1)
    grammar = grammar_of(Grammars(words, model.vocab_size, ()))
    parts = Parts()
    steps: dict[str, list[float]] = {}
    of_parts: dict[str, dict[str, float]] = {}
    for turn in range(asked.repeat):
        for kind in RULES:
            parts.medians()
            steps.setdefault(kind, []).extend(steps_ms(engine, kind, asked, grammar, turn))
            of_parts[kind] = parts.medians()
    for kind, took in steps.items():
        print(json.dumps({"rows": kind, "steps": len(took), "step_ms": round(statistics.median(took), 3),
                          "mean_ms": round(statistics.fmean(took), 3),
                          "fastest_tenth_ms": round(sorted(took)[len(took) // 10], 3),
                          "last_turn_parts_ms": of_parts[kind]}))  # fmt: skip
    print(json.dumps({"model": asked.model, "rows": asked.rows, "with_rules": asked.ruled,
                      "device": torch.cuda.get_device_name() if asked.device == "cuda" else "CPU",
                      "torch": torch.__version__}))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
