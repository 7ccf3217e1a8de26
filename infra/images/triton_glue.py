"""Compile, while an image is built, the C module with which Triton calls the driver: sites have no compiler.

The result lies in Triton's cache. There is no driver to link with, so a stub library of its name stands in.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def stand_in(source: Path, folder: Path) -> None:
    """Build a stub libcuda with every function that the module calls."""
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", source.read_text())))
    text = "\n".join(f"int {name}(void) {{ return 1; }}" for name in names)
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-xc", "-", "-o", str(library)]
    subprocess.run(command, input=text, text=True, check=True)


def main() -> int:
    """Compile the module and return the exit status; it can't be loaded here, and need not be."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        from triton.backends.nvidia import driver

        stand_in(Path(driver.dirname) / "driver.c", Path(folder))
        try:
            driver.CudaUtils()
        except ImportError as exc:
            sys.stderr.write(f"not loaded, as expected without a driver: {exc}\n")
    made = list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("cuda_utils*.so"))
    sys.stdout.write(f"{made}\n")
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
