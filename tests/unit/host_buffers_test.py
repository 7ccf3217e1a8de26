"""The memory of the host that steps of a device use in turn."""

from __future__ import annotations

import torch

from site_engine.cuda.host_buffers import HostBuffers, StepBuffers


def test_a_buffer_comes_back_only_after_all_others() -> None:
    buffers = HostBuffers(8, pinned=False)
    taken = [buffers.take(5) for _ in range(2 * HostBuffers.IN_TURN)]
    addresses = [each.data_ptr() for each in taken]
    assert len(set(addresses[: HostBuffers.IN_TURN])) == HostBuffers.IN_TURN
    assert addresses[HostBuffers.IN_TURN :] == addresses[: HostBuffers.IN_TURN]
    assert {len(each) for each in taken} == {5}


def test_a_large_one_is_new_and_leaves_the_others_in_their_turn() -> None:
    buffers = HostBuffers(8, pinned=False)
    first, large = buffers.take(8), buffers.take(9)
    assert len(large) == 9
    again = [buffers.take(8).data_ptr() for _ in range(HostBuffers.IN_TURN)]
    assert again[-1] == first.data_ptr()
    assert large.data_ptr() not in again


def test_a_step_has_buffers_of_its_own_which_the_next_one_reuses() -> None:
    buffers = StepBuffers(8, torch.float64, pinned=False)
    one = [buffers.take(size) for size in (3, 8, 9)]
    buffers.begin()
    other = [buffers.take(size) for size in (8, 8)]
    assert [len(each) for each in one] == [3, 8, 9]
    assert len({each.data_ptr() for each in one}) == 3
    assert [each.data_ptr() for each in other] == [each.data_ptr() for each in one[:2]]
    assert all(each.dtype == torch.float64 for each in one)
