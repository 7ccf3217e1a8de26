"""A quick write does to a file what `os.write` does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gateway.store.quick_write import write


def test_it_appends_bytes_as_they_are(tmp_path: Path) -> None:
    file = os.open(tmp_path / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    data = b'{"a": "\x00\xff"}\n'
    assert write(file, data) == len(data)
    assert write(file, b"") == 0
    assert write(file, b"next\n") == 5
    os.close(file)
    assert (tmp_path / "lines").read_bytes() == data + b"next\n"


def test_what_the_kernel_refuses_is_raised(tmp_path: Path) -> None:
    reading = os.open(tmp_path, os.O_RDONLY)
    os.close(reading)
    with pytest.raises(OSError, match="Bad file descriptor") as refused:
        write(reading, b"line\n")
    assert refused.value.errno == errno.EBADF


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device without room")
def test_a_disk_without_room_is_raised() -> None:
    file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left") as full:
        write(file, b"line\n")
    os.close(file)
    assert full.value.errno == errno.ENOSPC
