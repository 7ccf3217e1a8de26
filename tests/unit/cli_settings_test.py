"""Origins of client settings, and keys that never leave the machine by mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mico.errors import CommandFailed, ExitCode
from mico.settings import SETTINGS, Settings, read_file, redacted

SOURCES = ("flag", "MICO_BASE_URL", "OPENAI_BASE_URL", "mico.toml", ".mico", "default")


def settings(**sources: Any) -> Settings:
    return Settings(
        environment={name: value for name, value in sources.items() if name.isupper()},
        file=sources.get("file", {}),
        detected=sources.get("detected", {}),
    )


@given(st.sets(st.sampled_from(SOURCES[:-1])))
def test_the_first_source_that_speaks_wins(speaking: set[str]) -> None:
    environment = {name: name for name in speaking if name.isupper()}
    file = {"base_url": "mico.toml"} if "mico.toml" in speaking else {}
    detected = {"base_url": ".mico"} if ".mico" in speaking else {}
    resolved = Settings(environment, file, detected).resolve(
        "base_url", "flag" if "flag" in speaking else None
    )
    assert resolved.origin == next(source for source in SOURCES if source in {*speaking, "default"})
    if resolved.origin != "default":
        assert resolved.value == resolved.origin


def test_a_key_for_openai_is_not_sent_to_another_address() -> None:
    alone = settings(OPENAI_API_KEY="sk-theirs", detected={"base_url": "http://here", "api_key": "mico-ours"})
    assert alone.value("api_key") == "mico-ours"
    pair = settings(
        OPENAI_API_KEY="sk-theirs", OPENAI_BASE_URL="http://there", detected={"api_key": "mico-ours"}
    )
    assert pair.value("api_key") == "sk-theirs"


def test_a_file_sets_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mico.toml"
    file.write_text('[client]\nbase_url = "http://x/v1"\n[up]\nport = 9000\nmodel = "folder"\n')
    assert read_file(file) == {"base_url": "http://x/v1", "port": 9000, "up_model": "folder"}
    assert read_file(tmp_path / "absent.toml") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[client]\nbase_ulr = 'x'", "did you mean client.base_url?"),
        ("[up]\nport = 'many'", "whole number"),
        ("[up]\nport = 1.5", "port in"),
        ("[up]\nport = true", "whole number"),
        ("[up]\nport = [1]", "whole number"),
        ("[up]\nport = 65536", "0 to 65535"),
        ("[up]\nsites = 0", "1 to 32"),
        ("[client]\nmodel = ['a']", "a text"),
        (b"# \xff", "not TOML"),
        ("port = ", "not TOML"),
        ("port = 1", "unknown setting port"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str | bytes, reason: str) -> None:
    file = tmp_path / "mico.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(CommandFailed) as failure:
        read_file(file)
    assert reason in "\n".join(failure.value.lines())
    assert failure.value.exit_code is ExitCode.WRONG_USAGE


@given(st.text("abcdefgh0123456789", min_size=12))
def test_a_secret_is_never_shown(secret: str) -> None:
    assert secret not in redacted(secret)
    assert secret not in redacted(f"postgresql://user:{secret}@host/name")
    shown = Settings({"MICO_API_KEY": secret}, {}, {}).resolve("api_key").shown
    assert secret not in shown


@pytest.mark.parametrize(
    "address",
    [
        "postgresql:///mico?host=/run/postgresql&user=mico&password=hunter2",
        "postgresql://mico@db/mico?PASSWORD=hunter2&sslmode=require",
        "postgresql:///mico?user=mico&password=hunter2@home&sslpassword=hunter2",
    ],
)
def test_a_password_among_the_parameters_of_a_database_is_not_shown(address: str) -> None:
    """Postgres takes it there, too, and `mico config show` printed it."""
    shown = Settings({"MICO_DATABASE_URL": address}, {}, {}).resolve("database_url").shown
    assert "hunter2" not in shown
    assert shown.startswith("postgresql://")


def test_a_password_in_the_address_of_a_gateway_is_not_shown() -> None:
    found = Settings({"MICO_BASE_URL": "https://me:hunter2@proxy.example.com/v1"}, {}, {})
    assert found.resolve("base_url").shown == "https://me:***@proxy.example.com/v1"
    assert Settings({}, {}, {}).resolve("base_url").shown == "http://127.0.0.1:8080/v1"


def test_every_setting_has_a_name_of_its_own_in_the_environment() -> None:
    variables = [variable for setting in SETTINGS.values() for variable in setting.variables]
    assert len(variables) == len(set(variables))
