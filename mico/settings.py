"""Settings of client commands: flag, environment, mico.toml, local federation, default, in this order.

Does not hold the settings of the processes: those are gateway.config and site_engine.config.
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
    """One name in mico.toml (`table.key`) and the variables that override it, the most specific first."""

    name: str
    table: str
    variables: tuple[str, ...]
    default: str | int | None
    secret: bool = False
    min_value: int = 0
    max_value: int = 0
    """Bounds of a whole number."""


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
    """A value and its origin; `shown` contains neither a secret nor the password in an address."""

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
    """The sources of settings; `detected` are those of a federation that runs in this folder."""

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
        """Return whether a variable counts: a key for OpenAI does only if an address is set beside it.

        Otherwise that key would be sent to another address.
        """
        if variable != "OPENAI_API_KEY":
            return True
        return any(self.environment.get(name) for name in ("MICO_BASE_URL", "OPENAI_BASE_URL"))


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a mico.toml by name.

    Raises CommandFailed; for an unknown key it names the nearest known one.
    """
    if not path.exists():
        return {}
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
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
    """Convert a value to the type of the setting. Raises CommandFailed that names `where` it stands."""
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
    """Return an address without its password, or the last four characters of a key: enough to recognise.

    Postgres takes a password also among the parameters of an address.
    """
    if "://" in secret:
        secret = PASSWORD_PARAMETER.sub(r"\1***", secret)
        scheme, _, rest = secret.partition("://")
        login, at, host = rest.rpartition("@")
        return f"{scheme}://{login.partition(':')[0]}:***@{host}" if at else secret
    return f"…{secret[-4:]}" if len(secret) > 8 else "…"
