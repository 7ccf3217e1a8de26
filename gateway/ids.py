"""Ids that nobody else has. They are names, not secrets: who knows one can do nothing with it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from random import Random


def hex_ids() -> Callable[[], str]:
    """Draws 32 hexadecimal digits a call, from a seed of this process's own.

    Asking the operating system each time costs a system call, which hands the interpreter to another thread.
    """
    draw = Random(secrets.randbits(256)).getrandbits
    return lambda: f"{draw(128):032x}"
