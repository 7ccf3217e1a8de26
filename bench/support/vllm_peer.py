"""Serve passes of queries by vLLM with random weights and write what each took.

    python -m bench.support.vllm_peer WORK RESULTS

Runs where vLLM can be imported and imports nothing of this project. WORK is what `bench.support.beside_vllm`
writes; RESULTS gets a line of JSON once the engine is ready and one after each pass: both standard streams
are full of what vLLM logs. Ends with the program that has started it, and all of its own process group.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def served(llm: Any, one: dict[str, Any], adapters: list[Any]) -> dict[str, Any]:
    """Answer all queries of a pass at once; return the seconds and the cached tokens of prompts."""
    params: Any = importlib.import_module("vllm").SamplingParams
    prompts = [{"prompt_token_ids": ids} for ids in one["prompts"]]
    rules = [
        params(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for tokens in one["tokens"]
    ]
    chosen = [adapters[number] for number in one["adapters"]] or None
    began_s = time.perf_counter()
    answers = llm.generate(prompts, rules, use_tqdm=False, lora_request=chosen)
    took_s = time.perf_counter() - began_s
    if [len(each.outputs[0].token_ids) for each in answers] != one["tokens"]:
        raise RuntimeError(f"{one['name']}: answers are not as long as asked")
    cached = sum(each.num_cached_tokens or 0 for each in answers)
    return {"name": one["name"], "seconds": took_s, "cached_tokens": cached}


def end_with(parent: int) -> None:
    """Wait until another process is the parent of this one, then end the process group."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    work, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])

    def write(record: dict[str, Any]) -> None:
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")

    began_s = time.perf_counter()
    vllm: Any = importlib.import_module("vllm")
    lora: Any = importlib.import_module("vllm.lora.request")
    llm = vllm.LLM(
        **{
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "seed": 0,
            **work["arguments"],
        }
    )
    cache = llm.llm_engine.vllm_config.cache_config
    write({"start_s": time.perf_counter() - began_s, "kv_tokens": cache.kv_cache_size_tokens})
    adapters = [None] + [
        lora.LoRARequest(Path(folder).name, number, folder)
        for number, folder in enumerate(work["adapters"], start=1)
    ]
    for one in work["passes"]:
        write(served(llm, one, adapters))


if __name__ == "__main__":  # the engine's processes may import this file, too
    main()
