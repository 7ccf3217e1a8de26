"""Read single keys from a terminal without waiting for Enter, and restore the terminal afterwards."""

from __future__ import annotations

import os
import select
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

ARROWS = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
NAMES = {"\r": "enter", "\n": "enter", "\x7f": "back", "\x08": "back", "\x1b": "escape", "\x03": "quit"}


class Keyboard(Protocol):
    def read_key(self, timeout_s: float) -> str | None:
        """Return the name or the character of the next key, or None if there is no key within `timeout_s`."""


class TerminalKeyboard:
    """Read keys from the terminal at the file descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._typed = ""
        self._decoder = getincrementaldecoder("utf-8")("ignore")

    def read_key(self, timeout_s: float) -> str | None:
        if not self._typed and select.select([self._fd], [], [], timeout_s)[0]:
            read = os.read(self._fd, 1024)
            self._typed = self._decoder.decode(read) if read else "\x03"  # end of input quits
        return self._take()

    def _take(self) -> str | None:
        for sequence, name in ARROWS.items():
            if self._typed.startswith(sequence):
                self._typed = self._typed[len(sequence) :]
                return name
        first, self._typed = self._typed[:1], self._typed[1:]
        return NAMES.get(first, first) or None


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Yield the keyboard of stdin in cbreak mode, in which Ctrl-C still sends SIGINT."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield TerminalKeyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
