"""Read the configuration of a site: a TOML file, then MICO_SITE_* of the environment, then keywords.

A name that is not known is an error, which suggests one that is.
"""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from site_engine.config import ENGINES, MAX_NAME_CHARS, PRICES, SiteConfig, VariantConfig, require
from site_engine.errors import ConfigError
from site_engine.parse import BY_TYPE, parse_devices, parse_source

PREFIX = "MICO_SITE_"
_OF_GROUPS = ("served_model", "kv_tokens", "slots", *PRICES)
"""Settings that a group may have of its own, before those of its site."""


def load(path: Path | None, environ: Mapping[str, str], **overrides: Any) -> SiteConfig:
    """Load a configuration of one group at most; `load_groups` says how. Raises ConfigError."""
    found = load_groups(path, environ, **overrides)
    if len(found) > 1:
        names = ", ".join(each.site for each in found)
        raise ConfigError(f"this takes one [[group]], not {len(found)} ({names})")
    return found[0]


def load_groups(
    path: Path | None, environ: Mapping[str, str], defaults: Mapping[str, Any] = {}, /, **overrides: Any
) -> tuple[SiteConfig, ...]:
    """Load a configuration: later sources win, an override of None is none; `defaults` are of settings that
    none has. Each group of a file is a site of its own. Raises ConfigError.
    """
    settings: dict[str, Any] = {}
    groups: tuple[dict[str, Any], ...] = ()
    in_environment = {
        name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name.startswith(PREFIX)
    }
    for origin, values in (
        (str(path), {} if path is None else _toml(path)),
        ("the environment", in_environment),
        ("the command line", {name: value for name, value in overrides.items() if value is not None}),
    ):
        tables = values.pop("group", None)
        parsed = _parsed(values, origin)
        settings |= parsed
        for group in groups:
            group |= {name: value for name, value in parsed.items() if name in group}
        if tables is not None:
            groups = _groups(tables, settings)
    if "pool" in settings and "site" not in settings:
        settings["site"] = f"{settings['pool']}-{socket.gethostname().partition('.')[0]}"
    settings = {**defaults, **settings}
    if len(groups) > 1:
        _check_shared(settings, groups)
        settings["usd_per_hour"] = settings.get("usd_per_hour", 0.0) / len(groups)
    return tuple(_site_config({**settings, **group}) for group in groups or ({},))


def _parsed(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in values.items():
        known = _known(name, origin)
        settings[known] = _parsed_as(_PARSERS[known], known, value)
    return settings


def _parsed_as(parse: Callable[[Any], Any], name: str, value: Any) -> Any:
    try:
        return parse(value)
    except (TypeError, ValueError) as exc:
        shown = "" if name in {"token", "join_secret"} else f" {value!r}"
        raise ConfigError(f"{name} cannot be{shown}: {exc}") from exc


def _site_config(settings: dict[str, Any]) -> SiteConfig:
    if group := settings.pop("group", ""):
        settings["site"] = f"{settings.get('site', '')}/{group}".lstrip("/")
    engine = settings.get("engine", "native")
    require(engine in ENGINES, "engine", f"must be one of {', '.join(ENGINES)}")
    engine_of = "url" if engine != "native" else "model"
    missing = [name for name in ("site", "gateways", engine_of) if name not in settings]
    if missing:
        names = ", ".join(f"{name} ({PREFIX}{name.upper()})" for name in missing)
        raise ConfigError(f"not set: {names}; a file (--config), --set name=value or the variable sets it")
    sleeps = bool(settings.get("devices")) or settings.get("sleep", "disk") == "disk"
    require(sleeps, "sleep", "is set, but the base sleeps only where devices is set")
    return SiteConfig(**settings)


def _groups(value: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the settings that each [[group]] of a file makes. Raises ConfigError."""
    groups = _tables(value, "group", ("name", "model", "variant", *_OF_GROUPS))
    for name in ("model", "served_model"):
        require(name not in given, name, "is set beside [[group]], which has its own")
    made: dict[str, dict[str, Any]] = {}
    for group in groups:
        name = str(group.get("name", ""))
        require(bool(name) and name.isprintable() and "/" not in name, "group.name", "must be set, without /")
        require(name not in made, "group.name", f"{name} is there twice")
        require(bool(group.get("model")), "group.model", "must be set")
        own = {each: group[each] for each in ("model", *_OF_GROUPS) if each in group}
        variants = _variants(group.get("variant", []))
        made[name] = {"group": name, "variants": variants, **_parsed(own, f"group {name}")}
    require(bool(made), "group", "is empty")
    return tuple(made.values())


def _check_shared(settings: Mapping[str, Any], groups: Collection[Mapping[str, Any]]) -> None:
    """Check the settings that groups of one process share. Raises ConfigError."""
    for name in ("identity", "tls_cert", "pool"):
        whose = "is of one site" if name != "pool" else "counts machines by their sites"
        require(name not in settings, name, f"{whose}: run a process for each [[group]]")
    require("devices" not in settings, "devices", "are of one [[group]]: run a process for each")
    for group in groups:
        has_kv = bool(group.get("kv_tokens"))
        require(has_kv, f"group {group['group']}", "needs kv_tokens: groups of a process share one device")


def _variants(value: Any) -> tuple[VariantConfig, ...]:
    found: dict[str, VariantConfig] = {}
    for table in _tables(value, "group.variant", VariantConfig._fields):
        own = {key: _parsed_as(parse_source, f"group.variant.{key}", each) for key, each in table.items()}
        variant = VariantConfig(**{"id": "", **own})
        named = 0 < len(variant.id) <= MAX_NAME_CHARS and variant.id.isprintable()
        require(named, "group.variant", f"has an id that is not 1 to {MAX_NAME_CHARS} printable characters")
        require(variant.id not in found, "group.variant", f"names {variant.id} twice")
        one = bool(variant.adapter) != bool(variant.model)
        require(one, "group.variant", f"{variant.id} needs one of adapter and model")
        found[variant.id] = variant
    return tuple(found.values())


def _tables(value: Any, name: str, known: Collection[str]) -> list[dict[str, Any]]:
    """Return tables of a file. Raises ConfigError for anything else, and for a name that is not known."""
    tables = value if isinstance(value, list) else [value]
    for table in tables:
        require(isinstance(table, dict), name, f"must be a table: [[{name}]]")
        for key in table:
            require(key in known, f"{name}.{key}", f"is unknown; there are {', '.join(known)}")
    return tables


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _known(name: str, origin: str) -> str:
    if name in _PARSERS:
        return name
    close = get_close_matches(name, _PARSERS, 1)
    hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(_PARSERS)}"
    raise ConfigError(f"{origin} sets {name}, which is unknown{hint}")


_PARSERS = {each.name: BY_TYPE[str(each.type)] for each in fields(SiteConfig) if each.name != "variants"}
_PARSERS |= {"devices": parse_devices, "model": parse_source}
