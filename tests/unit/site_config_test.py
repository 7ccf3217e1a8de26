"""One frozen configuration: the sources of its values, and the words of its refusals."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from site_engine.app import announced_training
from site_engine.config import SiteConfig, VariantConfig
from site_engine.config_sources import load, load_groups
from site_engine.core.training import Trains
from site_engine.engine import process_messages as pm
from site_engine.engine.loading import slots_on
from site_engine.engine_client import Facts
from site_engine.engine_process import settings_to_config
from site_engine.errors import ConfigError
from site_engine.native import engine_settings
from site_engine.telemetry.logs import JsonLines

NEEDED = {"site": "alpha", "gateways": "gw:7000", "model": "demo"}


def test_devices_are_named_one_by_one_and_a_cpu_may_be_named_twice() -> None:
    assert load(None, {}, **NEEDED, devices="cpu, cpu").devices == ("cpu", "cpu")
    assert load(None, {"MICO_SITE_DEVICES": "cuda:0,cuda:1"}, **NEEDED).separates_engine
    assert load(None, {}, **NEEDED, devices="cpu+cpu").devices == ("cpu+cpu",)
    for wrong, words in (
        ({"devices": "cuda:0,cuda:0"}, "names cuda:0 twice"),
        ({"devices": "cuda"}, "name them as cuda:0"),
        ({"devices": "cpu", "device": "cpu"}, "exclude each other"),
        ({"devices": "cpu", "engine_process": "no"}, "need engine_process"),
        ({"devices": "cuda:0+cuda:1,cuda:1+cuda:2"}, "names cuda:1 twice"),
        ({"devices": "cuda:0", "sleep": "swap"}, "must be disk, host or a GPU"),
        ({"devices": "cuda:0+cuda:1", "sleep": "host"}, "must be disk for devices joined"),
        ({"sleep": "host"}, "sleeps only where devices is set"),
        ({"devices": "cpu", "share_sleeping_memory": "true", "kv_tokens": "9"}, "needs kv_tokens, and sleep"),
        ({"devices": "cpu", "share_sleeping_memory": "true", "sleep": "host"}, "needs kv_tokens, and sleep"),
        ({"devices": "cuda:0,cuda:1", "sleep": "cuda:1"}, "sleep on cuda:1 is for a base on other GPUs"),
        ({"devices": "cpu", "sleep": "cuda:1"}, "is for a base on other GPUs"),
        ({"devices": "cuda:0+"}, "has ''; name them as"),
        ({"devices": "cuda:0+cpu"}, "which are of two kinds"),
        ({"devices": "cuda:0+cuda:1,cuda:2"}, "have to be alike"),
        ({"devices": "cpu+cpu", "models_from": "/srv"}, "joined by [+] serve no variants"),
        ({"devices": "cpu+cpu", "training": "yes"}, "joined by [+] train nothing"),
        ({"device": "cuda:0+cuda:0"}, "device names cuda:0 twice"),
        ({"device": "cpu+cpu", "engine_process": "no"}, "device need engine_process"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(None, {}, **NEEDED, **wrong)


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        'site = "file"\nmodel = "file"\ngateways = ["a:1", "b:2", "a:1"]\nslots = 4\nregion = "r"\n'
    )
    config = load(
        file, {"MICO_SITE_SLOTS": "8", "MICO_SITE_MODEL": "env", "OTHER": "x"}, model="flag", region=None
    )
    assert (config.site, config.slots, config.model, config.region) == ("file", 8, "flag", "r")
    assert config.gateways == ("a:1", "b:2")


def test_text_of_the_environment_becomes_what_the_setting_is() -> None:
    environment = {
        "MICO_SITE_GATEWAYS": "a:1, b:2",
        "MICO_SITE_KV_TOKENS": "4096",
        "MICO_SITE_ITERATION_FLOOR_S": "0.05",
        "MICO_SITE_TLS": "yes",
        "MICO_SITE_TLS_CA": "/ca.pem",
    }
    config = load(None, environment, site="alpha", model="demo")
    assert (config.gateways, config.kv_tokens, config.iteration_floor_s) == (("a:1", "b:2"), 4096, 0.05)
    assert (config.tls, config.tls_ca, config.threads) == (True, Path("/ca.pem"), None)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"slot": 3}, "slot, which is unknown; did you mean slots"),
        ({"slots": 0}, "slots is 0; it must be at least 1"),
        ({"slots": 10**9}, "slots is 1000000000; it is at most 65,536"),
        ({"threads": 99_999}, "threads is 99999; it is at most 4,096"),
        ({"kv_tokens": 2**32}, "kv_tokens is 4294967296; it is at most 4,294,967,295"),
        ({"context_tokens": 10**9}, "context_tokens is 1000000000; it is at most 100,000,000"),
        ({"site": "a" * 201}, "site has at most 200 printable characters"),
        ({"site": "a\tb"}, "site has at most 200 printable characters"),
        ({"served_model": "a\tb"}, "served_model has at most 200 printable characters"),
        ({"token_file": "~nobody-here/token"}, "token_file cannot be '~nobody-here/token': "),
        ({"engine": "natve"}, "engine must be one of native, openai"),
        ({"slots": "many"}, "slots cannot be 'many'"),
        ({"slots": 64, "token_budget": 10}, "token_budget is 10; it must cover"),
        ({"gateways": "nowhere"}, "gateways has 'nowhere', which is not host:port"),
        ({"gateways": "http://gw:1"}, "gateways has 'http://gw:1', which is not host:port"),
        ({"gateways": []}, "gateways must be set"),
        ({"drain_s": -1}, "drain_s is -1.0"),
        ({"drain_s": "nan"}, "drain_s is nan"),
        ({"tls": "perhaps"}, "tls cannot be 'perhaps'"),
        ({"tls_ca": "/ca.pem"}, "tls is off"),
        ({"tls": True, "tls_cert": "/c.pem"}, "tls_cert and tls_key belong together"),
        ({"sampling_defaults": "mine"}, "sampling_defaults must be one of"),
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"log_level": "loud"}, "log_level must be one of"),
        ({"slots": True}, "whole number"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("(", "\\(")):
        load(None, {}, **{**NEEDED, **settings})


def test_what_is_missing_is_named_with_its_variable() -> None:
    with pytest.raises(ConfigError, match=r"gateways \(MICO_SITE_GATEWAYS\), model \(MICO_SITE_MODEL\)"):
        load(None, {}, site="alpha")


def test_machines_of_a_pool_join_under_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "ip-10-0-0-7.internal")
    settings = {name: value for name, value in NEEDED.items() if name != "site"}
    assert load(None, {}, **settings, pool="aws-eu").site == "aws-eu-ip-10-0-0-7"
    assert load(None, {}, **NEEDED, pool="aws-eu").site == NEEDED["site"]


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text("slots = = 3")
    with pytest.raises(ConfigError, match=r"site\.toml"):
        load(file, {})


def test_the_token_is_nobodys_business(tmp_path: Path) -> None:
    config = load(None, {}, **NEEDED, token="s3cret")
    assert "s3cret" not in repr(config)
    assert config.secret() == "s3cret"
    file = tmp_path / "token"
    file.write_text("from-a-file\n")
    assert load(None, {}, **NEEDED, token_file=str(file)).secret() == "from-a-file"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load(None, {}, **NEEDED, token_file=str(file)).secret()
    with pytest.raises(ConfigError, match="token_file"):
        load(None, {}, **NEEDED, token_file=str(tmp_path / "none")).secret()
    for unsendable in (b"\xff\xfea\x00", b"one\ntwo", "ключ".encode()):  # UTF-16, as PowerShell writes it
        file.write_bytes(unsendable)
        with pytest.raises(ConfigError, match="token_file "):
            load(None, {}, **NEEDED, token_file=str(file)).secret()
    with pytest.raises(ConfigError) as complaint:
        load(None, {}, **NEEDED, token=["s3cret"])
    assert "s3cret" not in str(complaint.value)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load(None, {}, **NEEDED).slots = 3


def test_slots_are_by_the_device_unless_somebody_says() -> None:
    said = SiteConfig(site="a", model="m", gateways=("h:1",))
    assert [slots_on(device, said) for device in ("cpu", "cuda", "cuda:1")] == [32, 256, 256]
    assert slots_on("cuda", replace(said, slots=3)) == 3
    assert (
        slots_on("cuda", replace(said, token_budget=64)) == 64
    )  # one token of each in an iteration, at least


def test_a_log_line_is_one_json_object() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("who", logging.ERROR, "", 0, "lost %s", ("é\n",), sys.exc_info())
    line = JsonLines("alpha").format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["site"], told["message"]) == ("error", "alpha", "lost é\n")
    assert "ValueError: a\nb" in told["fault"]


def test_an_engine_on_a_gpu_has_a_process_of_its_own_unless_told() -> None:
    basic: dict[str, Any] = {"site": "a", "model": "m", "gateways": ("h:1",)}
    assert SiteConfig(**basic, device="cuda:1").separates_engine
    assert not SiteConfig(**basic, device="cpu").separates_engine
    assert not SiteConfig(**basic, device="cuda", engine_process=False).separates_engine
    told = load(None, {"MICO_SITE_ENGINE_PROCESS": "true"}, **basic, device="cpu")
    assert told.separates_engine


def test_an_engine_gets_all_settings_but_secrets() -> None:
    config = SiteConfig(
        site="a",
        model="m",
        gateways=("h:1", "h:2"),
        token="hidden",
        token_file=Path("/run/token"),
        tls=True,
        tls_ca=Path("/run/ca"),
        slots=7,
        threads=None,
        share_prefixes=True,
        variants=(VariantConfig("acme/support", adapter="/srv/support"),),
    )
    sent = pm.Start(engine_settings(config))
    assert "hidden" not in str(sent)
    assert "/run" not in str(sent)
    got = pm.decode_to_engine(pm.frame(sent)[4:])
    assert isinstance(got, pm.Start)
    assert settings_to_config(got) == replace(config, token="", token_file=None, tls_ca=None)


GROUP = """
site = "alpha"
gateways = ["gw:7000"]
models_from = ["/srv/models"]
[[group]]
name = "llama"
model = "/srv/models/llama-8b"
served_model = "llama-8b"
[[group.variant]]
id = "acme/support"
adapter = "/srv/models/support-lora"
[[group.variant]]
id = "acme/legal"
model = "/srv/models/legal"
"""


def test_a_group_is_a_base_with_variants_and_a_site_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text(GROUP)
    config = load(file, {})
    assert (config.site, config.model, config.served_model) == (
        "alpha/llama",
        "/srv/models/llama-8b",
        "llama-8b",
    )
    assert config.variants == (
        VariantConfig("acme/support", adapter="/srv/models/support-lora"),
        VariantConfig("acme/legal", model="/srv/models/legal"),
    )
    assert config.models_from == ("/srv/models",)
    assert load(file, {"MICO_SITE_SITE": "beta"}).site == "beta/llama"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('name = "llama"', 'nam = "llama"', "group.nam is unknown; there are name, model"),
        ('name = "llama"', 'name = "a/b"', "group.name must be set, without /"),
        ('model = "/srv/models/llama-8b"', "", "group.model must be set"),
        ('adapter = "/srv', 'adaptor = "/srv', "group.variant.adaptor is unknown"),
        ('adapter = "/srv/models/support-lora"', "", "acme/support needs one of adapter and model"),
        ('id = "acme/legal"', 'id = "acme/support"', "names acme/support twice"),
        ('id = "acme/legal"', "", "has an id that is not 1 to 200"),
        ('id = "acme/legal"', "id = 7", "group.variant.id cannot be 7: it must be text"),
        ('adapter = "/srv/models/support-lora"', "adapter = []", "group.variant.adapter cannot be"),
        ('model = "/srv/models/llama-8b"', "model = 8", "model cannot be 8: it must be text"),
        ('["/srv/models"]', '["models"]', "models_from has 'models', neither a full path nor hf:NAME/"),
        ('["/srv/models"]', '["hf:acme"]', "models_from has 'hf:acme', neither a full path nor hf:NAME/"),
        ('site = "alpha"', 'site = "alpha"\nmodel = "m"', "model is set beside"),
        ('site = "alpha"', 'site = "alpha"\nengine = "openai"\nurl = "http://s"', "need the native engine"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    file = tmp_path / "site.toml"
    assert old in GROUP
    file.write_text(GROUP.replace(old, new, 1))
    with pytest.raises(ConfigError, match=complaint):
        load(file, {})


GROUPS = (
    GROUP.replace("[[group]]\n", "[[group]]\nkv_tokens = 4096\nslots = 4\n", 1)
    + """
[[group]]
name = "qwen"
model = "/srv/models/qwen"
kv_tokens = 2048
output_usd_per_mtok = 0.5
"""
)


def test_each_group_of_a_file_is_a_site_of_its_own_and_pays_its_part(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text("usd_per_hour = 3.0\nslots = 8\n" + GROUPS.replace("output_usd_per_mtok = 0.5\n", ""))
    llama, qwen = load_groups(file, {})
    assert [each.site for each in (llama, qwen)] == ["alpha/llama", "alpha/qwen"]
    assert [len(each.variants) for each in (llama, qwen)] == [2, 0]
    assert [each.kv_tokens for each in (llama, qwen)] == [4096, 2048]
    assert [each.slots for each in (llama, qwen)] == [4, 8]
    assert llama.usd_per_hour == qwen.usd_per_hour == 1.5
    assert [each.slots for each in load_groups(file, {"MICO_SITE_SLOTS": "2"})] == [2, 2]
    with pytest.raises(ConfigError, match=r"one \[\[group\]\], not 2 \(alpha/llama, alpha/qwen\)"):
        load(file, {})
    file.write_text("input_usd_per_mtok = 0.1\n" + GROUPS)
    assert [each.output_usd_per_mtok for each in load_groups(file, {})] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("kv_tokens = 2048", "", "group qwen needs kv_tokens: groups of a process share one device"),
        ('name = "qwen"', 'name = "llama"', "group.name llama is there twice"),
        ("kv_tokens = 2048", "kv_tokens = true", "kv_tokens cannot be True"),
        ("kv_tokens = 2048", "token_budget = 1", "group.token_budget is unknown"),
        ('site = "alpha"', 'site = "alpha"\npool = "eu"', "pool counts machines by their sites"),
        ('site = "alpha"', 'site = "alpha"\ntls = true\nidentity = "/k"', "identity is of one site"),
    ],
)
def test_groups_that_cannot_share_a_process_are_refused(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    file = tmp_path / "site.toml"
    assert old in GROUPS
    file.write_text(GROUPS.replace(old, new, 1))
    with pytest.raises(ConfigError, match=complaint):
        load_groups(file, {})


def test_a_site_trains_only_where_its_engine_can_and_says_why_not() -> None:
    able = {**NEEDED, "training": True, "device": "cpu"}
    assert load(None, {}, **able, training_usd_per_mtok=2.0).training
    assert load(None, {}, **able, engine_process=True).training
    assert load(None, {}, **{**able, "device": "auto", "devices": "cpu,cpu"}).training
    assert load(None, {}, **{**able, "device": "cuda:0"}).training
    for changed, words in (
        ({"engine": "openai", "url": "http://server:1"}, "training needs the native engine"),
        ({"training": False, "training_usd_per_mtok": 2.0}, "training is off"),
        ({"training_usd_per_mtok": 2.0, "usd_per_hour": 1.0}, "exclude each other"),
        ({"training_usd_per_mtok": -1.0}, "0 or more"),
        (
            {"training": False, "training_deferral": "iteration"},
            "training_deferral is set, but training is off",
        ),
        ({"training_deferral": "batch"}, "training_deferral must be one of slice, iteration"),
        ({"training_between_tokens_s": 0.0}, "training_between_tokens_s is 0.0; it must be more than 0"),
        ({"training_between_tokens_s": float("nan")}, "it must be more than 0"),
        ({"training_least_share": 1.0}, "it must be 0 or more, and less than 1"),
        ({"training_least_share": float("nan")}, "it must be 0 or more, and less than 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(None, {}, **{**able, **changed})


def test_a_gpu_trains_what_its_slots_serve() -> None:
    facts = Facts("m", "r", 4096, 1000, (), 8, 10_000)
    on_cpu, on_gpu = (load(None, {}, **NEEDED, training=True, device=device) for device in ("cpu", "cuda:0"))
    assert announced_training(load(None, {}, **NEEDED, device="cpu"), facts) is None
    assert announced_training(on_cpu, facts) == Trains(8, 64, 0.0)
    assert announced_training(on_gpu, facts) is None, "it has no slots"
    assert announced_training(on_gpu, facts._replace(slots_bytes=1)) == Trains(8, 16, 0.0)


def test_folders_may_be_named_from_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of secrets may, and as a plan reads them."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "site.toml"
    file.write_text(
        'site = "a"\ngateways = "gw:1"\n[[group]]\nname = "g"\nmodel = "~/base"\n'
        '[[group.variant]]\nid = "v"\nadapter = "~/adapter"\n'
    )
    (variant,) = load(file, {}).variants
    assert (load(file, {}).model, variant.adapter) == ("/home/me/base", "/home/me/adapter")
    assert load(None, {}, site="a", gateways="gw:1", model="~/base").model == "/home/me/base"
    assert load(None, {}, site="a", gateways="gw:1", model="acme/base").model == "acme/base"
