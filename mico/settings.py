"""Settings of client commands, resolved from flag, environment, mico.toml, local federation, default.

The settings of the server processes are in gateway.config and site_engine.config.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mico.errors import CommandFailed, ExitCode

FILE = "mico.toml"
PASSWORD_PARAMETER = re.compile(r"([?&](?:ssl)?password=)[^&]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting: its key in mico.toml (`table.key`), and the variables that override it, by precedence."""

    name: str
    table: str
    variables: tuple[str, ...]
    default: str | int | None
    secret: bool = False
    min_value: int = 0
    max_value: int = 0
    """`min_value` and `max_value` are the bounds of an integer."""


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("base_url", "client", ("MICO_BASE_URL", "OPENAI_BASE_URL"), "http://127.0.0.1:8080/v1"),
        Setting("api_key", "client", ("MICO_API_KEY", "OPENAI_API_KEY"), None, secret=True),
        Setting("model", "client", ("MICO_MODEL",), None),
        Setting("database_url", "client", ("MICO_DATABASE_URL",), "sqlite:///.mico/mico.db", secret=True),
        Setting("port", "up", ("MICO_PORT",), 8080, max_value=65_535),
        Setting("sites", "up", ("MICO_SITES",), 3, min_value=1, max_value=32),
        Setting("up_model", "up", ("MICO_UP_MODEL",), None),
    )
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A value and its origin. `shown` is the value without secrets and without the password of a URL."""

    setting: Setting
    value: Any
    origin: str

    @property
    def shown(self) -> str:
        if self.value is None:
            return "-"
        is_secret = self.setting.secret or "://" in str(self.value)
        return redacted(str(self.value)) if is_secret else str(self.value)


@dataclass(frozen=True, slots=True)
class Settings:
    """The sources of settings. `detected` are the settings of the federation that runs in this folder."""

    environment: Mapping[str, str]
    file: Mapping[str, Any]
    detected: Mapping[str, Any]

    def resolve(self, name: str, flag: Any = None) -> Resolved:
        setting = SETTINGS[name]
        if flag is not None:
            return Resolved(setting, flag, "flag")
        for variable in setting.variables:
            if self.environment.get(variable) and self.is_trusted(variable):
                return Resolved(setting, parse_value(setting, self.environment[variable], variable), variable)
        if name in self.file:
            return Resolved(setting, self.file[name], FILE)
        if name in self.detected:
            return Resolved(setting, self.detected[name], ".mico")
        return Resolved(setting, setting.default, "default")

    def value(self, name: str, flag: Any = None) -> Any:
        return self.resolve(name, flag).value

    def is_trusted(self, variable: str) -> bool:
        """Return whether a variable is used. OPENAI_API_KEY is used only if a base URL is also set.

        Otherwise the key would be sent to a server that it is not for.
        """
        if variable != "OPENAI_API_KEY":
            return True
        return any(self.environment.get(name) for name in ("MICO_BASE_URL", "OPENAI_BASE_URL"))


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a mico.toml file by name.

    Raises CommandFailed. For an unknown key, the tip names the closest known key.
    """
    if not path.exists():
        return {}
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:  # invalid TOML or UTF-8
        raise CommandFailed(
            f"{path} is not TOML", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    except OSError as error:
        raise CommandFailed(
            f"{path} cannot be read", cause=error.strerror or str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    return {setting.name: value for setting, value in entries(path, tables)}


def entries(path: Path, tables: Mapping[str, Any]) -> list[tuple[Setting, Any]]:
    known = {f"{setting.table}.{file_key(setting)}": setting for setting in SETTINGS.values()}
    found = []
    for table, keys in tables.items():
        for key, value in keys.items() if isinstance(keys, dict) else [("", keys)]:
            dotted = f"{table}.{key}".rstrip(".")
            if dotted not in known:
                near = difflib.get_close_matches(dotted, known, n=1)
                tip = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise CommandFailed(
                    f"{path} has an unknown setting {dotted}", tip=tip, exit_code=ExitCode.WRONG_USAGE
                )
            found.append((known[dotted], parse_value(known[dotted], value, f"{dotted} in {path}")))
    return found


def file_key(setting: Setting) -> str:
    return setting.name.removeprefix(f"{setting.table}_")


def parse_value(setting: Setting, value: Any, where: str) -> Any:
    """Convert a value to the type of the setting. Raises CommandFailed, which names the origin `where`."""
    if not isinstance(setting.default, int):
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise invalid_value(where, "a text", value)
    try:
        number = None if isinstance(value, bool | float) else int(value)
    except (ValueError, TypeError):
        number = None
    if number is None:
        raise invalid_value(where, "a whole number", value)
    if not setting.min_value <= number <= setting.max_value:
        raise invalid_value(where, f"{setting.min_value} to {setting.max_value}", value)
    return number


def invalid_value(where: str, expected: str, value: Any) -> CommandFailed:
    return CommandFailed(f"{where} must be {expected}, not {value!r}", exit_code=ExitCode.WRONG_USAGE)


def redacted(secret: str) -> str:
    """Return a URL without its password, or the last four characters of a key, which identify it.

    PostgreSQL URLs can contain a password in the query parameters as well.
    """
    if "://" in secret:
        secret = PASSWORD_PARAMETER.sub(r"\1***", secret)
        scheme, _, rest = secret.partition("://")
        login, at, host = rest.rpartition("@")
        return f"{scheme}://{login.partition(':')[0]}:***@{host}" if at else secret
    return f"…{secret[-4:]}" if len(secret) > 8 else "…"
