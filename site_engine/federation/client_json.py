"""Decode JSON that clients wrote, and refuse what nests too deeply for any later work on it."""

from __future__ import annotations

import json
from typing import Any

from site_engine.errors import NotServed, Reason

MAX_NESTING = 256
"""Lists and objects within one another: far below the depth at which decoding or encoding them again, from
wherever in the site, exceeds the interpreter's stack.
"""


def decode_json(text: str, kind: type, param: str) -> Any:
    """Decode JSON whose outermost value is of `kind`. Raises NotServed, which names `param`."""
    too_deep = f"{param} nests lists and objects more than {MAX_NESTING} deep"
    try:
        found = json.loads(text)
    except ValueError as exc:
        raise NotServed(Reason.INVALID, f"{param} is not JSON: {exc}", param) from exc
    except RecursionError as exc:
        raise NotServed(Reason.INVALID, too_deep, param) from exc
    if not isinstance(found, kind):
        message = f"{param} is not what it should be, but {type(found).__name__}"
        raise NotServed(Reason.INVALID, message, param)
    if text.count("[") + text.count("{") > MAX_NESTING and _nests_too_deeply(found):
        raise NotServed(Reason.INVALID, too_deep, param)
    return found


def _nests_too_deeply(found: Any) -> bool:
    level = [found]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
