"""The settings of a site in front of a server: required ones, refused ones, and the key in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from site_engine.config import SiteConfig
from site_engine.config_sources import load
from site_engine.errors import ConfigError

NEEDED = {"site": "front", "gateways": "gw:7000", "engine": "openai", "url": "http://server:8000/v1"}


def test_a_server_needs_no_model_and_an_engine_no_url() -> None:
    assert load(None, {}, **NEEDED).model == ""
    assert load(None, {}, site="a", gateways="gw:7000", model="m").engine == "native"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"url": None}, "not set: url"),
        ({"url": "server:8000"}, "url must begin with http"),
        ({"url": "http://server:port/v1"}, "url has no host, or a port that is no number"),
        ({"url": "http:///v1"}, "url has no host"),
        ({"url": "http://me:secret@server"}, "url must not carry a password"),
        ({"engine": "vllm"}, "engine must be one of native, openai"),
        ({"engine": "native", "model": "m"}, "url is set, but engine is native"),
        ({"engine": "native"}, "not set: model"),
        ({"key_env": "A", "key_file": "/b"}, "key_env and key_file exclude each other"),
        ({"requests_per_min": "0"}, "requests_per_min is 0"),
        ({"silence_s": "-1"}, "silence_s is -1"),
    ],
)
def test_what_can_not_work_is_refused_by_name(settings: dict[str, str | None], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        load(None, {}, **{**NEEDED, **settings})
    assert "secret" not in str(refused.value)


def test_the_servers_key_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sk-file\n")
    assert load(None, {}, **NEEDED).server_key({}) == ""
    assert load(None, {}, **NEEDED, key_env="KEY").server_key({"KEY": "sk-env"}) == "sk-env"
    of_file = load(None, {}, **NEEDED, key_file=str(secret))
    assert of_file.server_key({}) == "sk-file"
    assert "sk-file" not in repr(of_file)
    of_environment = load(None, {}, **NEEDED, key_env="KEY")
    assert of_environment.server_key({"KEY": "sk-env\n"}) == "sk-env"  # as secrets of clusters often end
    with pytest.raises(ConfigError, match="key_env ") as refused:  # else the site would log it, asking
        of_environment.server_key({"KEY": "sk-env\nmore"})
    assert "sk-env" not in str(refused.value)
    with pytest.raises(ConfigError, match="KEY is not set"):
        load(None, {}, **NEEDED, key_env="KEY").server_key({})
    secret.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        of_file.server_key({})


def test_slots_of_a_server_are_not_bound_by_our_own_budget_of_tokens() -> None:
    assert SiteConfig(site="a", gateways=("h:1",), engine="openai", url="http://s", slots=4096).slots == 4096
