"""Query the GPU architecture that Triton compiles for."""

from __future__ import annotations

from triton.runtime import driver


def architecture() -> int:
    """Return ten times the GPU's compute capability, such as 90 for 9.0."""
    return int(driver.active.get_current_target().arch)
