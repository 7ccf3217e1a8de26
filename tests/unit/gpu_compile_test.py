"""Every kernel compiles for the GPUs we name on a machine that has none: the interpreter forgives much."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "kernel_compile.py"


@pytest.mark.parametrize("architecture", ["80", "90"])
def test_the_kernels_compile(architecture: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, architecture], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "decode_rows" in done.stdout
