"""A thread that loads pauses before every operation of PyTorch."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

from site_engine.core.loader_turns import pause


class PauseBeforeOperations(TorchFunctionMode):  # type: ignore[misc]
    """A context in which each operation of PyTorch pauses before it begins, as within a model's own code."""

    def __torch_function__(self, operation: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        pause()
        return operation(*given, **(named or {}))
