"""transformers' own ways of serving the same queries: `generate` on static batches, continuous batching."""

from __future__ import annotations

import time
from collections.abc import Callable
from inspect import signature
from itertools import islice
from typing import Any, NamedTuple

import torch
import transformers

from bench.support.workload import Query

Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
PAGE_TOKENS = 16
KNOWN_OPTIONS = signature(transformers.ContinuousBatchingConfig).parameters
PAGE_OPTION = "page_size" if "page_size" in KNOWN_OPTIONS else "block_size"  # so called in 5.17


class Limits(NamedTuple):
    """The resources that every contender is given."""

    slots: int  # queries at once
    token_budget: int  # of an iteration
    kv_tokens: int  # of keys and values


class Run(NamedTuple):
    """One pass over all queries; `answers` in their order, `step_ms` the median decode iteration if known."""

    seconds: float
    answers: list[list[int]]
    step_ms: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def limits_for(work: list[Query], slots: int, token_budget: int) -> Limits:
    """Return limits with keys and values for the longest queries at once: nothing waits for memory."""
    whole = sorted((len(query.prompt) + query.response_tokens for query in work), reverse=True)
    return Limits(slots, token_budget, sum(whole[:slots]) + PAGE_TOKENS * slots)


def run_static(model: Any, work: list[Query], limits: Limits, clock: Clock) -> Run:
    """Run `generate` on batches in order of arrival, padded left, each as long as its longest answer."""
    answers: list[list[int]] = []
    began = clock()
    for first in range(0, len(work), limits.slots):
        batch = work[first : first + limits.slots]
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


def run_continuous(model: Any, work: list[Query], limits: Limits, clock: Clock) -> Run:
    """Run transformers' continuous batching with the true length of every answer."""
    settings = transformers.ContinuousBatchingConfig(
        num_blocks=-(-limits.kv_tokens // PAGE_TOKENS),
        **{PAGE_OPTION: PAGE_TOKENS},
        max_batch_tokens=max(limits.token_budget, limits.slots),
    )
    generation = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1024
    )
    manager = model.init_continuous_batching(generation, settings)
    manager.start()
    answers: dict[str, list[int]] = {}
    waiting = enumerate(work)
    began = clock()
    for at, query in islice(waiting, limits.slots):
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


PEERS: dict[str, Callable[[Any, list[Query], Limits, Clock], Run]] = {
    "transformers-static": run_static,
    "transformers-cb": run_continuous,
}
