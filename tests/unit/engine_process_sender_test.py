"""No iteration waits for a site that reads slowly, and nothing of what it is owed is lost or overtakes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from site_engine.engine.process_server import Sender

PARTS = [bytes([number % 251]) * 1000 for number in range(2000)]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.settimeout(60.0)
    with ours, theirs:
        yield ours, theirs
        ours.shutdown(socket.SHUT_RDWR)


def test_what_is_not_read_yet_holds_nothing_up_and_arrives_in_order(ends) -> None:
    ours, theirs = ends
    sender = Sender(ours)
    for part in PARTS:
        sender.send(part)
    expected, got = b"".join(PARTS), bytearray()
    while len(got) < len(expected):
        got += theirs.recv(1 << 16)
    assert got == expected
    sender.send(b"more")
    assert theirs.recv(9) == b"more"


def test_a_site_that_reads_nothing_ends_the_engine(ends) -> None:
    sender = Sender(ends[0], max_bytes=100_000)
    with pytest.raises(ConnectionError, match="has not read"):
        for part in PARTS:
            sender.send(part)


def test_a_site_that_is_gone_is_not_an_error_of_the_iteration(ends) -> None:
    ours, theirs = ends
    sender = Sender(ours)
    theirs.close()
    sender.send(b"nobody hears")
