"""Addresses of a device, over a driver that only counts."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from site_engine.cuda.device_range import DeviceRange, DeviceRoom, Driver
from site_engine.errors import NoMemory
from site_engine.model.sleep_memory import SleepMemory

PAGE = 1024


class CountingDriver:
    """Memory without an address by name, and what is mapped by address: nothing overlaps, nothing is lost."""

    granularity = PAGE
    total_bytes = 16 * PAGE

    def __init__(self, free_bytes: int = 16 * PAGE) -> None:
        self.free_bytes = free_bytes
        self.sizes: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # names by address
        self._names = 0
        self._addresses = 1 << 20

    def reserve(self, size_bytes: int) -> int:
        self._addresses += 1 << 20
        return self._addresses

    def create(self, size_bytes: int) -> int:
        assert size_bytes % PAGE == 0
        if size_bytes > self.free_bytes:
            raise NoMemory("full")
        self.free_bytes -= size_bytes
        self._names += 1
        self.sizes[self._names] = size_bytes
        return self._names

    def map(self, address: int, size_bytes: int, memory: int) -> None:
        assert self.sizes[memory] == size_bytes
        assert memory not in self.mapped.values()
        assert not any(
            at < address + size_bytes and address < at + self.sizes[its] for at, its in self.mapped.items()
        )
        self.mapped[address] = memory

    def unmap(self, address: int, size_bytes: int) -> None:
        gone = [at for at in self.mapped if address <= at < address + size_bytes]
        assert sum(self.sizes[self.mapped[at]] for at in gone) == size_bytes
        for at in gone:
            del self.mapped[at]

    def release(self, memory: int) -> None:
        assert memory not in self.mapped.values()
        self.free_bytes += self.sizes.pop(memory)

    def bytes_at(self, address: int, size_bytes: int) -> torch.Tensor:
        begin = min(self.mapped)
        end = begin + sum(self.sizes[its] for its in self.mapped.values())
        assert begin <= address <= address + size_bytes <= end
        return torch.tensor([address - begin, size_bytes])


def made(driver: Any) -> DeviceRange:
    return DeviceRange(driver)


def test_memory_comes_and_goes_at_the_same_addresses() -> None:
    driver = CountingDriver()
    addresses = made(driver)
    assert addresses.take(700).tolist() == [0, 700]
    assert addresses.take(10).tolist() == [1024, 10]  # aligned, in memory of its own
    assert addresses.take(1500).tolist() == [1536, 1500]
    assert addresses.mapped_bytes == 3 * PAGE
    assert driver.free_bytes == 13 * PAGE
    before = set(driver.mapped)
    for _ in range(2):
        addresses.unmap()
        addresses.unmap()
        assert addresses.mapped_bytes == 0
        assert (driver.free_bytes, driver.sizes, driver.mapped) == (16 * PAGE, {}, {})
        addresses.map()
        assert set(driver.mapped) == before
        assert [each.tolist() for each in addresses.taken()] == [[0, 1536 + 1500]]
        assert addresses.mapped_bytes == 3 * PAGE


def test_a_device_that_is_full_gets_back_what_was_got() -> None:
    driver = CountingDriver()
    addresses = made(driver)
    addresses.take(2 * PAGE)
    addresses.take(3 * PAGE)
    addresses.unmap()
    driver.free_bytes -= 12 * PAGE
    with pytest.raises(NoMemory, match="full"):
        addresses.map()
    assert (driver.free_bytes, driver.mapped, addresses.mapped_bytes) == (4 * PAGE, {}, 0)
    driver.free_bytes += 12 * PAGE
    addresses.map()
    assert addresses.mapped_bytes == 5 * PAGE


def test_no_more_is_taken_than_the_device_has() -> None:
    addresses = made(CountingDriver(free_bytes=3 * PAGE))
    addresses.take(PAGE)
    with pytest.raises(NoMemory, match="full"):
        addresses.take(4 * PAGE)
    with pytest.raises(NoMemory, match="more than the device has"):
        addresses.take(16 * PAGE)
    assert addresses.take(PAGE).tolist() == [PAGE, PAGE]


def test_without_any_weights_there_is_nothing_to_copy() -> None:
    driver = CountingDriver()
    memory = SleepMemory(torch.device("cpu"), lambda: made(driver))
    assert memory.sleep() == 0
    memory.wake()


def test_a_room_grows_and_shrinks_by_parts_at_its_addresses() -> None:
    driver = CountingDriver()
    room = DeviceRoom(cast(Driver, driver), 8 * PAGE)
    room.resize(PAGE + 1)
    room.resize(3 * PAGE)
    room.resize(5 * PAGE - 9)
    addresses = sorted(driver.mapped)
    assert [driver.sizes[driver.mapped[at]] for at in addresses] == [2 * PAGE, PAGE, 2 * PAGE]
    assert (room.mapped_bytes, driver.free_bytes) == (5 * PAGE, 11 * PAGE)
    kept = driver.mapped[addresses[0]]
    room.resize(3 * PAGE)
    assert sorted(driver.mapped) == addresses[:2]
    room.resize(PAGE + 1)
    assert driver.mapped == {addresses[0]: kept}  # whose contents are what they were
    driver.free_bytes = 2 * PAGE
    with pytest.raises(NoMemory, match="full"):
        room.resize(5 * PAGE)
    assert driver.mapped == {addresses[0]: kept}
    room.resize(0)
    assert (driver.sizes, driver.mapped, driver.free_bytes) == ({}, {}, 4 * PAGE)
    room.resize(2 * PAGE)
    assert list(driver.mapped) == addresses[:1]
