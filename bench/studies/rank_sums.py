"""Measure how the ranks of a tensor group sum a layer's rows, and what a copy between their devices takes.

    python -m bench.studies.rank_sums --devices cuda:0,cuda:1 --sizes 4096,8192 --rows 8,64,256,512

A process for each device, joined as an engine's are; each sees its own device alone. Within a CUDA graph of
`--repeat` sums, each with the norm after it: NCCL and the norm's kernel, and the kernel that exchanges rows
through the ranks' memory. Microseconds of one, the slowest rank's; the sums of all ranks have to be equal bit
by bit, and those of NCCL up to the rounding of one addition. Exit status 1 if they are not. Then the rates of
copies to and from a neighbour's memory, and the time of handing it keys and values of 2,000 tokens. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import distributed

from site_engine.core.inbox import InboxPlace
from site_engine.core.request import Moved, Request
from site_engine.cuda.llama_forward import Norm
from site_engine.cuda.page_copies import DevicePageCopies
from site_engine.cuda.rank_sums import RankSums
from site_engine.cuda.shared_memory import memory_of_ranks, shared_memory
from site_engine.engine.child import see_one_device
from site_engine.engine.ranks import Rank, join
from site_engine.model.kv_cache import KVCache, LayerShape
from site_engine.model.kv_inbox import KVInbox
from site_engine.model.tensor_group import TensorGroup

COPIED_BYTES = 1 << 30
MOVED_TOKENS = 2000
WITHIN_S = 120.0
ROUNDING = 2**-5
"""Of a sum of a few normal numbers in bfloat16."""


def microseconds(work: Any, repeat: int) -> float:
    """Return the time of one of `repeat` calls in a captured graph, the least of five replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(repeat):
            work()
        graph.capture_end()
    took: list[float] = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(1e3 * begin.elapsed_time(end) / repeat)
    return min(took[1:])


def measured(group: TensorGroup, size: int, rows: int, repeat: int) -> dict[str, Any]:
    """Time both ways of one sum; return them with the sums that this rank got."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    random = torch.Generator(device).manual_seed(group.rank)
    weight = torch.ones(size, dtype=dtype, device=device)
    drawn = torch.randn(rows, size, dtype=dtype, device=device, generator=random)
    residual = torch.zeros_like(drawn)
    found: dict[str, Any] = {}
    for name, inbox in (("nccl", 0), ("exchange", rows)):
        norm = Norm(weight, 1e-6, RankSums(group, inbox, size, dtype, device))
        residual.zero_()
        part = drawn.clone()  # which NCCL sums in place
        norm.add(part, residual)
        torch.cuda.synchronize()
        found[f"{name}_sum"] = residual.cpu().view(torch.int16).numpy()
        part.zero_()
        found[f"{name}_us"] = microseconds(partial(norm.add, part, residual), repeat)
    return found


def copies(group: TensorGroup) -> dict[str, float]:
    """Return GB/s of a copy from a neighbour's memory and to it."""
    memory = memory_of_ranks(group, COPIED_BYTES, torch.device("cuda"))
    own, other = memory[group.rank], memory[(group.rank + 1) % group.size]
    found = {}
    for name, to, source in (("from", own, other), ("to", other, own)):
        group.least(0)
        if group.rank == 0:
            to.copy_(source)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            to.copy_(source)
            end.record()
            torch.cuda.synchronize()
            found[f"{name}_gb_per_s"] = COPIED_BYTES / begin.elapsed_time(end) / 1e6
        group.least(0)
    return found


def handed_over(group: TensorGroup) -> dict[str, float]:
    """Hand pages of an 8B model's keys and values to the next rank, as a request that moves does.

    Return the milliseconds of both ends, and whether the pages came bit by bit.
    """
    shapes, device = [LayerShape(8, 128, 128)] * 32, torch.device("cuda")
    size = MOVED_TOKENS // 16 + 5, 16
    kv_cache = KVCache(shapes, *size, torch.bfloat16, device, copies=DevicePageCopies)
    for room in (*kv_cache.keys, *kv_cache.values):
        room.normal_()
    inbox = KVInbox(kv_cache, shared_memory)
    addresses: list[Any] = [None] * group.size
    distributed.all_gather_object(addresses, inbox.open())
    pages = random.Random(group.rank).sample(range(1, kv_cache.pages), MOVED_TOKENS // 16)
    ahead_ms = rest_ms = received_ms = 0.0
    moving, to = Request("moving", ()), InboxPlace(addresses[(group.rank + 1) % group.size], 1)
    moving.row, moving.pages = 0, pages
    for _ in range(3):
        group.least(0)
        moving.computed = MOVED_TOKENS - 1  # all pages but the last go ahead
        began_s = time.perf_counter()
        while inbox.send_ahead(moving, to):
            pass
        ahead_ms = 1e3 * (time.perf_counter() - began_s)
        moving.computed = MOVED_TOKENS
        began_s = time.perf_counter()
        sent = inbox.send(moving, to)
        inbox.sent(to)
        rest_ms = 1e3 * (time.perf_counter() - began_s)
        group.least(0)
        place = InboxPlace(addresses[group.rank], 1)
        began_s = time.perf_counter()
        kept = inbox.receive(Moved(0.0, computed=MOVED_TOKENS, place=place))
        received_ms = 1e3 * (time.perf_counter() - began_s)
    digests: list[Any] = [None] * group.size
    distributed.all_gather_object(digests, digest(packed(kv_cache, pages)))
    right = sent > 0 and kept is not None and digest(kept) == digests[group.rank - 1]
    times = {"send_ahead_ms": ahead_ms, "send_rest_ms": rest_ms, "receive_ms": received_ms}
    return times | {"pages_right": float(right)}


def packed(kv_cache: KVCache, pages: list[int]) -> torch.Tensor:
    kept = torch.empty(len(pages), kv_cache.copies.page_bytes, dtype=torch.uint8, device=kv_cache.device)
    kv_cache.copies.pack(kv_cache.index(pages), kept)
    return kept


def digest(pages: torch.Tensor) -> str:
    return hashlib.sha256(pages.cpu().numpy().tobytes()).hexdigest()


def compared(size: int, rows: int, told: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the times of the slowest rank, and whether all have the same sums, which are those of NCCL."""
    sums = [torch.from_numpy(its["exchange_sum"]) for its in told.values()]
    nccl = torch.from_numpy(told[0]["nccl_sum"]).view(torch.bfloat16)
    right = all(torch.equal(one, sums[0]) for one in sums)
    off = float((nccl.float() - sums[0].view(torch.bfloat16).float()).abs().max())
    took = {name: round(max(its[name] for its in told.values()), 2) for name in ("nccl_us", "exchange_us")}
    return {"size": size, "rows": rows, **took, "off": off, "right": right and off <= ROUNDING}


def rank(number: int, devices: list[str], store: str, options: argparse.Namespace, answers: Any) -> None:
    see_one_device(devices[number])
    descriptor = os.open(store, os.O_RDWR)
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    group = join(Rank(number, len(devices), descriptor), device)
    with torch.no_grad():
        for size in options.sizes:
            for rows in options.rows:
                answers.put((number, size, rows, measured(group, size, rows, options.repeat)))
        answers.put((number, 0, 0, copies(group) | handed_over(group)))
    group.least(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.rank_sums",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = lambda text: [int(each) for each in text.split(",")]  # noqa: E731 - a type of argparse
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--sizes", type=numbers, default=[4096, 8192], help="numbers of a row")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256, 512])
    parser.add_argument("--repeat", type=int, default=64, help="sums in a graph")
    options = parser.parse_args()
    devices = options.devices.split(",")
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    found: dict[str, Any] = {"sums": []}
    told: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}  # by sizes, then by rank
    with tempfile.NamedTemporaryFile() as store:
        ranks = [
            context.Process(target=rank, args=(number, devices, store.name, options, answers))
            for number in range(len(devices))
        ]
        for each in ranks:
            each.start()
        for name in [*product(options.sizes, options.rows), (0, 0)]:
            while len(told.get(name, {})) < len(devices):
                number, size, rows, its = answers.get(timeout=WITHIN_S)
                told.setdefault((size, rows), {})[number] = its
            if name == (0, 0):
                found["copies"] = {each: round(rate, 2) for each, rate in told[name][0].items()}
            else:
                found["sums"].append(compared(*name, told[name]))
                print(json.dumps(found["sums"][-1]), flush=True)
        for each in ranks:
            each.join(30)
    print(json.dumps(found))
    return 0 if all(each["right"] for each in found["sums"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
