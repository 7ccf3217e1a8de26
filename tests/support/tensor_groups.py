"""A tensor group in one process: a thread for each rank, sums by Gloo, one rank computing at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import distributed

from site_engine.engine.build import device_runner, overlapped_engine, packed_engine, packed_runner
from site_engine.engine.engine import SiteEngine
from site_engine.engine.ranks import follow
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel, load
from site_engine.model.tensor_group import TensorGroup
from tests.support.engine_models import Ticks, tokenizer
from tests.support.model_families import random_model

LOOPBACK = "127.0.0.1"
WITHIN_S = 60.0


class Ranks:
    """The process group of a thread, which lets others go on while it waits: Triton's interpreter, where
    kernels run in it, has no room for two.
    """

    def __init__(self, store: Any, rank: int, size: int, turn: threading.Lock) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=WITHIN_S)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, options)
        self._turn = turn

    def rank(self) -> int:
        return int(self._gloo.rank())

    def size(self) -> int:
        return int(self._gloo.size())

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._wait(self._gloo.allreduce(tensors, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._wait(self._gloo.broadcast(tensors, options))

    def _wait(self, work: Any) -> None:
        self._turn.release()
        try:
            work.wait()
        finally:
            self._turn.acquire()


class Announced:
    """What a leader has sent to a follower, in order; None ends it."""

    def __init__(self, turn: threading.Lock) -> None:
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._turn = turn

    def send(self, message: Any) -> None:
        self._messages.put(message)

    def __call__(self) -> Any:
        self._turn.release()
        message = self._messages.get()
        self._turn.acquire()
        if message is None:
            raise EOFError
        return message


class Group:
    """`engine` leads; `models` are those of all ranks, `followed` the runners of the others."""

    engine: SiteEngine

    def __init__(self) -> None:
        self.models: dict[int, LoadedModel] = {}
        self.followed: list[Any] = []
        self.failures: list[BaseException] = []


@contextmanager
def grouped(folder: Path, size: int = 2, *, fused: bool = False, **settings: Any) -> Iterator[Group]:
    """Serve a folder's model with a group of so many ranks; `fused`: with the kernels of a GPU."""
    chosen = EngineSettings(**{"slots": 6, "token_budget": 32, "page_size": 4, "kv_tokens": 512} | settings)
    group, turn, store = Group(), threading.Lock(), distributed.HashStore()
    channels = [Announced(turn) for _ in range(size - 1)]

    def begin(rank: int, ranks: Ranks) -> LoadedModel:
        followers = channels if rank == 0 else []
        member = TensorGroup(ranks, torch.device("cpu"), followers, group.failures.append)  # type: ignore[arg-type]
        group.models[rank] = load(str(folder), group=member)
        return group.models[rank]

    def serve(rank: int) -> None:
        ranks = Ranks(store, rank, size, turn)
        try:
            with turn:
                model = begin(rank, ranks)
                forward = fast_forward(model) if fused else None
                reference = packed_runner(model, chosen)
                runner = device_runner(model, chosen, reference, forward) if fused else None
                group.followed.append(runner or reference)
                follow(channels[rank - 1], reference, runner)
        except Exception as failure:  # noqa: BLE001 - the test looks at it
            group.failures.append(failure)

    if fused:
        from site_engine.cuda.forward import fast_forward
    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    try:
        ranks = Ranks(store, 0, size, turn)
        with turn:
            model = begin(0, ranks)
            if fused:
                group.engine = overlapped_engine(model, chosen, Ticks(), fast_forward(model))
            else:
                group.engine = packed_engine(model, chosen, Ticks())
            yield group
    finally:
        for channel in channels:
            channel.send(None)
        for thread in threads:
            thread.join(WITHIN_S)
    assert not group.failures
    assert not any(thread.is_alive() for thread in threads)


def saved(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model with a tokenizer and return it."""
    plain = random_model(config)
    plain.to(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return plain
