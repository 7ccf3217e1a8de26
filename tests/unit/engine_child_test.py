"""A process of an engine sees the device that is its own, under the name that every thread has for it."""

from __future__ import annotations

import pytest

from site_engine.engine.child import VISIBLE, see_devices, see_one_device
from site_engine.errors import ConfigError


def test_the_others_are_hidden_whatever_was_hidden_before() -> None:
    for given, name, seen in (
        (None, "cuda:1", "1"),
        ("4,5,6", "cuda:1", "5"),
        ("GPU-a, GPU-b", "cuda:0", "GPU-a"),
    ):
        environ = {} if given is None else {VISIBLE: given}
        assert see_one_device(name, environ) == "cuda:0"
        assert environ == {VISIBLE: seen}


def test_a_neighbour_is_seen_behind_the_own_device() -> None:
    environ = {VISIBLE: "4,5,6"}
    assert see_devices(["cuda:2", "cuda:0"], environ) == ["cuda:0", "cuda:1"]
    assert environ == {VISIBLE: "6,4"}
    environ = {}
    assert see_devices(["cuda:1", "host"], environ) == ["cuda:0", "host"]
    assert see_devices(["cpu", "cuda:1"], {}) == ["cpu", "cuda:1"]
    assert environ == {VISIBLE: "1"}


def test_what_names_no_gpu_hides_none() -> None:
    environ: dict[str, str] = {}
    assert [see_one_device(name, environ) for name in ("auto", "cpu", "cuda")] == ["auto", "cpu", "cuda"]
    assert not environ


def test_a_device_that_is_hidden_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is cuda:1, but CUDA_VISIBLE_DEVICES is '7'"):
        see_one_device("cuda:1", {VISIBLE: "7"})
