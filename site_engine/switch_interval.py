"""How soon threads of a site's processes take the interpreter from each other."""

from __future__ import annotations

import sys

SWITCH_S = 2e-4
"""After which a thread gives up the interpreter to one that waits. A step of the engine gives it up about
ten times and then waits each time for a thread that loads a variant: 50 ms with Python's own 5 ms. A prompt
that is read beside a busy event loop waits two or three times.
"""


def switch_soon() -> None:
    """Set the interval of this process."""
    sys.setswitchinterval(SWITCH_S)
