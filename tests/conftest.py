"""What has to be settled before any test imports torch or Triton."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only lose by sharing their sums out

if not Path("/dev/nvidiactl").exists():
    # Without a GPU the kernels run in Triton's interpreter. Triton's own functions are made for the mode that
    # it was imported in, and libraries import it: too late once the first of them is there.
    os.environ["TRITON_INTERPRET"] = "1"
