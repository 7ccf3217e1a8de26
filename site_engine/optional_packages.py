"""Keep transformers from importing packages that are installed but that a process does not use."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

UNUSED = ("scipy", "sklearn", "boto3")
"""What transformers and accelerate import for methods, losses and clouds that no engine has."""


def hide(*names: str) -> None:
    """Make packages that are not imported yet look as if they were not installed, for the whole process.

    Python finds None in `sys.modules` and raises ModuleNotFoundError; transformers finds the package absent.
    """
    modules = cast(dict[str, Any], sys.modules)
    for name in names:
        modules.setdefault(name, None)


def hide_torch() -> None:
    """Let transformers read tokenizers alone, in a fraction of the time and memory that it takes with torch.

    For a process that loads no model.
    """
    hide("torch")
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )
