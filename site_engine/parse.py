"""Parse the values of settings, as a TOML file has them or as text. All raise TypeError or ValueError."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def parse_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("it must be text")
    return value


def parse_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("it must be a whole number")
    return int(value)


def parse_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError("it must be a number")
    return float(value)


def parse_bool(value: Any) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in words:
        raise ValueError("it must be true or false")
    return words[str(value).lower()]


def parse_path(value: Any) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError as exc:  # there is no such user
        raise ValueError(str(exc)) from exc


def parse_source(value: Any) -> str:
    """Parse a folder, perhaps below the home, or another name."""
    text = parse_text(value)
    return str(parse_path(text)) if text.startswith("~/") else text


def parse_list(value: Any) -> tuple[str, ...]:
    """Parse a list, or text with commas; keep each item once."""
    parts = value.split(",") if isinstance(value, str) else [parse_text(each) for each in value]
    return tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))


def parse_devices(value: Any) -> tuple[str, ...]:
    """Parse a list, or text with commas; `cpu` may stand there several times."""
    parts = value.split(",") if isinstance(value, str) else [parse_text(each) for each in value]
    return tuple(part.strip() for part in parts)


def is_address(text: str) -> bool:
    """Return whether text is host:port, and no URL."""
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536


def has_host(url: str) -> bool:
    """Return whether a URL has a host, and no port that is no number. Raises nothing."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "str": parse_text,
    "int": parse_int,
    "int | None": parse_int,
    "float": parse_float,
    "float | None": parse_float,
    "bool": parse_bool,
    "bool | None": parse_bool,
    "Path | None": parse_path,
    "tuple[str, ...]": parse_list,
}
"""The parser of a setting, by its type as it is written."""
