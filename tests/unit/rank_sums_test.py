"""Ranks in processes of their own exchange rows through shared memory; the kernel runs interpreted."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

# isort: split
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.cuda.llama_forward import Norm
from site_engine.cuda.rank_sums import RankSums
from site_engine.cuda.shared_memory import memory_of_ranks
from site_engine.model.descriptors import DescriptorExchange

WITHIN_S = 60.0
SIZE = 48
STEPS = (3, 1, 3, 2, 4, 3)  # rows


class Files:
    """A store in a folder; what is written appears at once, and whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        (self._folder / "draft").with_suffix(f".{os.getpid()}").write_text(value)
        (self._folder / "draft").with_suffix(f".{os.getpid()}").rename(self._folder / key)

    def get(self, key: str) -> bytes:
        while not (self._folder / key).exists():
            os.sched_yield()
        return (self._folder / key).read_bytes()


class Member:
    """What `RankSums` needs of a tensor group."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = Files(folder)
        self.exchange = DescriptorExchange(self._store, rank, size)

    def least(self, number: int) -> int:
        self._store.set(f"number of {self.rank}", str(number))
        return min(int(self._store.get(f"number of {rank}")) for rank in range(self.size))


class Apart(Member):
    """A rank that cannot have the memory of others."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        super().__init__(folder, rank, size)
        self._exchange, self.exchange = self.exchange, self.fail

    def fail(self, descriptor: int) -> list[int]:
        self._exchange(descriptor)
        raise RuntimeError("no way")


def parts_of(rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(1 + step % 3, STEPS[step], SIZE, generator=random)


def exchange(folder: Path, rank: int, size: int, answer: Any) -> None:
    torch.set_num_threads(1)
    member: Any = Member(folder, rank, size)
    cpu = torch.device("cpu")
    norm = Norm(torch.ones(SIZE), 1e-6, RankSums(member, 4, SIZE, torch.float32, cpu))
    residual, normed = torch.zeros(4, SIZE), []
    for step, rows in enumerate(STEPS):
        normed.append(norm.add_parts(parts_of(rank, step), residual[:rows], pdl=False))
    answer.send([each.numpy() for each in (residual, *normed)])


def stay_apart(folder: Path, rank: int, size: int, answer: Any) -> None:
    member: Any = (Apart if rank == 1 else Member)(folder, rank, size)
    sums = RankSums(member, 4, SIZE, torch.float32, torch.device("cpu"))
    answer.send((sums.exchanges(1), sums.exchanges(0)))


def remember(folder: Path, rank: int, size: int, answer: Any) -> None:
    memory = memory_of_ranks(Member(folder, rank, size), 64, torch.device("cpu"))  # type: ignore[arg-type]
    for each in memory:
        each[rank] = rank + 1
    answer.send("written")
    answer.recv()
    answer.send([each[:size].tolist() for each in memory])


def started(work: Any, folder: Path, size: int) -> list[Any]:
    """Start a process for each rank; return the connections to them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # what takes seconds to import is imported once
    ends = [context.Pipe() for _ in range(size)]
    for rank, (_, theirs) in enumerate(ends):
        context.Process(target=work, args=(folder, rank, size, theirs), daemon=True).start()
    return [ours for ours, _ in ends]


def received(connection: Any) -> Any:
    assert connection.poll(WITHIN_S)
    return connection.recv()


@pytest.mark.slow
def test_all_ranks_have_the_same_sums_step_after_step(tmp_path: Path) -> None:
    size = 3
    ranks = started(exchange, tmp_path, size)
    answers = [[torch.from_numpy(each) for each in received(rank)] for rank in ranks]
    residual, wanted = torch.zeros(4, SIZE), []
    for step, rows in enumerate(STEPS):
        residual[:rows] += sum(parts_of(rank, step).sum(0) for rank in range(size))
        wanted.append(F.rms_norm(residual[:rows], (SIZE,), torch.ones(SIZE), 1e-6))
    for found in answers:
        torch.testing.assert_close(found, [residual, *wanted])
        assert all(torch.equal(one, other) for one, other in zip(found, answers[0], strict=True))


def test_where_one_rank_cannot_have_the_memory_of_others_none_exchanges_rows(tmp_path: Path) -> None:
    assert [received(each) for each in started(stay_apart, tmp_path, 3)] == [(False, True)] * 3


def test_memory_of_each_rank_is_everybodys(tmp_path: Path) -> None:
    ranks = started(remember, tmp_path, 3)
    assert [received(each) for each in ranks] == ["written"] * 3
    for each in ranks:
        each.send("read")
    assert [received(each) for each in ranks] == [[[1, 2, 3]] * 3] * 3
