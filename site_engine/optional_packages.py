"""Keep transformers from importing packages that are installed but that a process does not use."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
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


COMPILER = "torch._dynamo"


class _NoCompiler(ModuleType):
    """Stands in for the compiler of torch: all that is taken from it are decorators that change nothing.

    Its modules can be imported each by itself.
    """

    def __init__(self, torch: ModuleType) -> None:
        super().__init__(COMPILER)
        self.__path__ = [str(Path(each) / "_dynamo") for each in torch.__path__]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _unchanged


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _unchanged


@contextmanager
def without_compiler(*, distributed: bool) -> Iterator[None]:
    """Let transformers be imported and load a model without torch's compiler, and without torch's distributed
    tensors but where `distributed`: their imports take a fifth of a start.

    transformers marks functions for the compiler: kernels of formats that no engine has, and batches of its
    own. Without the marks they run all the same. The compiler can be imported afterwards.
    """
    import torch

    stand_in, is_available = _NoCompiler(torch), torch.distributed.is_available
    sys.modules.setdefault(COMPILER, stand_in)
    if not distributed:
        torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        if sys.modules[COMPILER] is stand_in:
            del sys.modules[COMPILER]
