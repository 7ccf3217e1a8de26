"""Make unique ids. They are names, not secrets: knowing one grants nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from random import Random


def hex_ids() -> Callable[[], str]:
    """Return a function that draws 32 hexadecimal digits a call, from a generator seeded for this process.

    Asking the operating system each time would cost a system call, which switches to another Python thread.
    """
    draw = Random(secrets.randbits(256)).getrandbits
    return lambda: f"{draw(128):032x}"
