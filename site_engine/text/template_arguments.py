"""Chat template arguments: those derived from a reasoning effort and those provided by clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NO_REASONING = frozenset({"none", "minimal"})
NEAREST_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Maps efforts that few templates and servers support to the nearest widely supported effort."""


def effort_arguments(effort: str) -> dict[str, Any]:
    """Return the template arguments for an effort, or none if `effort` is empty."""
    if not effort:
        return {}
    return switches(effort) | {"reasoning_effort": NEAREST_EFFORTS.get(effort, effort)}


def switches(effort: str) -> dict[str, Any]:
    """Return the arguments that enable or disable reasoning: `enable_thinking` for Qwen, SmolLM and GLM,
    `thinking` for DeepSeek, Granite and Kimi.
    """
    return dict.fromkeys(("enable_thinking", "thinking"), effort not in NO_REASONING)


def shielded(kwargs: Mapping[str, Any], shield: Callable[[str], str]) -> dict[str, Any]:
    """Apply `shield` to all strings in a client's arguments, including keys."""
    return {shield(name): _shielded(value, shield) for name, value in kwargs.items()}


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [_shielded(each, shield) for each in value]
    return shielded(value, shield) if isinstance(value, dict) else value
