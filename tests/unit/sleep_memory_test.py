"""Memory that comes and goes: what is kept is there again, and what is freed is what was said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from site_engine.errors import NoMemory
from site_engine.model import sleep_memory
from site_engine.model.sleep_memory import HostRange, SleepMemory


@pytest.fixture
def memory() -> SleepMemory:
    return SleepMemory(torch.device("cpu"))


def test_kept_tensors_lose_their_memory_and_have_it_again_at_their_addresses(memory: SleepMemory) -> None:
    joint = torch.randn(8, 6)
    view, turned = joint[2:4], torch.nn.Parameter(torch.randn(5, 3).t())
    numbers, nothing = torch.arange(7), torch.empty(0)
    kept = [joint, view, turned, numbers, nothing]
    wanted = [each.detach().clone() for each in kept]
    memory.keep(kept)
    places = [each.data_ptr() for each in kept]
    assert view.data_ptr() == joint.data_ptr() + 2 * 6 * 4  # it goes on being a part
    for _ in range(2):
        assert memory.sleep() == 8 * 6 * 4 + 5 * 3 * 4 + 7 * 8
        assert not joint.any()
        assert not numbers.any()
        memory.wake()
        assert [each.data_ptr() for each in kept] == places
        assert all(torch.equal(each, one) for each, one in zip(kept, wanted, strict=True))
        assert turned.stride() == (1, 3)


def test_copies_on_another_device_are_given_up_when_the_base_is_awake() -> None:
    class Neighbour(HostRange):
        copies_in_host = False
        copies = 0

        def room_for_copy(self, size_bytes: int) -> torch.Tensor:
            Neighbour.copies += 1
            return super().room_for_copy(size_bytes)

    memory = SleepMemory(torch.device("cpu"), Neighbour)
    tensor = torch.randn(100)
    memory.keep([tensor])
    for times in (1, 2):
        wanted = tensor.add_(times).clone()  # a copy from before would show
        memory.sleep()
        memory.wake()
        assert torch.equal(tensor, wanted)
        assert Neighbour.copies == times


def test_rooms_are_zeros_again(memory: SleepMemory) -> None:
    room = memory.room((4, 5), torch.bfloat16)
    assert not room.any()
    room.fill_(float("nan"))
    assert memory.sleep() == 4 * 5 * 2
    memory.wake()
    assert room.shape == (4, 5)
    assert torch.equal(room, torch.zeros_like(room))


def test_without_host_memory_for_the_copy_nothing_changes(
    memory: SleepMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensor = torch.randn(1000)
    wanted = tensor.clone()
    memory.keep([tensor])
    said = tmp_path / "meminfo"
    said.write_text("MemTotal: 8 kB\nMemAvailable:  3 kB\n")
    monkeypatch.setattr(sleep_memory, "MEMORY_OF_HOST", said)
    with pytest.raises(NoMemory, match="has 4000 bytes, and the host 3072 free"):
        memory.sleep()
    assert torch.equal(tensor, wanted)
    said.write_text("unknown")
    assert memory.sleep() == 4000


def test_without_memory_to_wake_it_sleeps_on(memory: SleepMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(100)
    wanted = tensor.clone()
    memory.keep([tensor])
    room = memory.room((10,), torch.float32)
    memory.sleep()
    mapped = sleep_memory.HostRange.map

    def no_room(self: sleep_memory.HostRange) -> None:
        if self is memory._rooms:
            raise NoMemory("the device is full")
        mapped(self)

    with monkeypatch.context() as patched, pytest.raises(NoMemory, match="the device is full"):
        patched.setattr(sleep_memory.HostRange, "map", no_room)
        memory.wake()
    assert not tensor.any()  # what it had got is given back
    memory.wake()
    assert torch.equal(tensor, wanted)
    assert not room.any()
