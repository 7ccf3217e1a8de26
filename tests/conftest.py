"""Settings that have to be made before any test is collected or imports torch or Triton."""

from __future__ import annotations

import gc
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.support.scheduling import OneFederation

# The same examples in every run, in whatever time they take: a failure is due to a change, not to a draw or a
# slow machine. `--hypothesis-profile=default` looks for new ones.
settings.load_profile("ci")

gc.disable()  # what is made while tests are collected stays, and to look through it costs 4 s

# Bytecode is kept also where the environment says otherwise: each of the processes that tests start would
# compile all that it imports, a gateway for half a second.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only lose by sharing their sums out

# Kernels run in Triton's interpreter, also beside a GPU, since the models of tests are on the CPU. With
# TRITON_INTERPRET=0 the tests that can run compiled kernels do. Triton's own functions are made for the mode
# that it was imported in, and libraries import it: too late once the first of them is there.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """From now on only what tests make is looked through."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneFederation | None:
    """Of a run that shares out files, keep the end-to-end tests' federation with one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.support.scheduling import OneFederation

    return OneFederation(config, log)
