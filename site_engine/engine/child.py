"""Prepare a process of an engine: it ends with its parent and sees only its own devices."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import count

from site_engine.errors import ConfigError

PR_SET_PDEATHSIG = 1
VISIBLE = "CUDA_VISIBLE_DEVICES"


def end_with_parent() -> None:
    """Have this process killed when its parent ends, even if it hangs. No effect except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def see_one_device(name: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Hide all GPUs but the named one from this process and return its new name. Other names are returned
    unchanged.

    CUDA's current device is per thread: threads that set none launch on the first device. Must be called
    before CUDA is first used. Raises ConfigError if the GPU is already hidden.
    """
    return see_devices([name], environ)[0]


def see_devices(names: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Hide all GPUs but the named ones, the first of which becomes cuda:0; return the new names.

    As `see_one_device`. If the first name has no GPU number, nothing is hidden.
    """
    numbered = [re.fullmatch(r"cuda:(\d+)", name) for name in names]
    if not numbered[0]:
        return [*names]
    environ[VISIBLE] = ",".join(nth_visible(int(each[1]), environ) for each in numbered if each)
    now = map("cuda:{}".format, count())
    return [next(now) if each else name for name, each in zip(names, numbered, strict=True)]


def nth_visible(number: int, environ: Mapping[str, str]) -> str:
    given = environ.get(VISIBLE)
    if given is None:
        return str(number)
    names = [each.strip() for each in given.split(",") if each.strip()]
    if number >= len(names):
        raise ConfigError(f"device is cuda:{number}, but {VISIBLE} is {given!r}")
    return names[number]
