"""Generate unique ids. They are names, not secrets."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from random import Random


def hex_ids() -> Callable[[], str]:
    """Return a function that draws 32 hexadecimal digits per call, from a generator seeded once.

    Drawing from the operating system would cost a system call each time, which switches Python threads.
    """
    draw = Random(secrets.randbits(256)).getrandbits
    return lambda: f"{draw(128):032x}"
