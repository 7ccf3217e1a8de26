"""The memory of the host that steps of a device use in turn."""

from __future__ import annotations

from site_engine.cuda.runner import HostBuffers


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
