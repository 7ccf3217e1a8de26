"""Settings of a gateway: where they come from, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ConfigError, GatewayConfig, load


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('http_port = 1001\nname = "file"\npeers = ["a:1", "b:2"]\n')
    config = load(file, {"MICO_GATEWAY_NAME": "environment", "MICO_OTHER": "x"}, {"http_port": 1003})
    assert (config.http_port, config.name, config.peers) == (1003, "environment", ("a:1", "b:2"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"htp_port": 1}, "did you mean http_port"),
        ({"http_port": "many"}, "must be int"),
        ({"policy": "best"}, "there are: mico"),
        ({"most_live": 0}, "must be above 0"),
        ({"http_port": 8081}, "need two ports"),
        ({"metrics_port": 8080}, "one of its own"),
        ({"http_port": 65_000}, "metrics_port is 66000"),
        ({"http_port": True}, "must be int"),
        ({"http_port": 8080.7}, "must be int"),
        ({"name": ""}, "name is ''; it has 1 to 200 printable characters"),
        ({"name": "a\nb"}, "printable"),
        ({"name": 3}, "name in the command line is 3; it must be str"),
        ({"host": ["a"]}, "must be str"),
        ({"peers": {"a": 1}}, "must be tuple"),
        ({"peers": [1]}, "must be tuple"),
        ({"peers": ["gateway-2"]}, "peers has 'gateway-2'; each is the host:port"),
        ({"peers": ["gateway-2:grpc"]}, "each is the host:port"),
        ({"peers": ["http://gateway-2:8081"]}, "each is the host:port"),
        ({"site_tokens": [1234567]}, "site_tokens in the command line is a value of another type"),
        ({"http_port": 99999}, "from 0 to 65535"),
        ({"mtls_port": -1}, "from 0 to 65535"),
        ({"answer_within_s": "nan"}, "must be float"),
        ({"drain_s": float("inf")}, "must be float"),
        ({"drain_s": -5}, "can't be negative"),
        ({"log_level": "LOUD"}, "is one of: DEBUG"),
        ({"tls_names": "gätt.example"}, "as DNS has it"),
        ({"workers": 0}, "from 1 to 64"),
        ({"workers": 2, "grpc_port": 0}, "2 workers need a number"),
        ({"workers": 3, "http_port": 8085, "grpc_port": 8081}, "port 8085 would be needed twice"),
        ({"workers": 2, "pki": "pki", "mtls_port": 8083}, "port 8083 would be needed twice"),
        ({"workers": 2, "grpc_port": 65_535}, "grpc_port is 65537"),
        ({"worker": 2}, "unknown setting 'worker'"),
    ],
)
def test_a_wrong_setting_says_what_and_where(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(None, {}, given)


def test_a_path_that_was_left_empty_is_none() -> None:
    """As a variable of the environment is that a compose file has no value for."""
    config = load(None, {"MICO_GATEWAY_TLS_CERT": "", "MICO_GATEWAY_TLS_KEY": "", "MICO_GATEWAY_PKI": ""}, {})
    assert (config.tls_cert, config.tls_key, config.pki) == (None, None, None)


def test_tokens_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="site_token_file can't be read"):
        GatewayConfig(site_token_file=tmp_path / "none").tokens()


def test_no_door_stands_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no site could join"):
        GatewayConfig().tokens()
    tokens = tmp_path / "tokens"
    tokens.write_text("one\ntwo\n")
    assert GatewayConfig(site_tokens=("zero",), site_token_file=tokens).tokens() == ("zero", "one", "two")


def test_secrets_are_not_shown() -> None:
    shown = repr(GatewayConfig(site_tokens=("canary-1",), key_pepper="canary-2", database_url="canary-3"))
    assert "canary" not in shown


@pytest.mark.parametrize("content", [b"= 3", b"\xff"])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml can't be read"):
        load(file)


@pytest.mark.parametrize("given", ["", ",", " , ", [""], [" "]])
def test_a_token_that_was_left_empty_is_no_token(given: object) -> None:
    config = load(None, {}, {"site_tokens": given})
    with pytest.raises(ConfigError, match="no site could join"):
        config.tokens()


def test_what_stands_beside_an_empty_token_counts() -> None:
    assert load(None, {"MICO_GATEWAY_SITE_TOKENS": "one, two,"}, {}).tokens() == ("one", "two")


def test_what_kubernetes_sets_for_a_service_of_this_name_is_no_setting() -> None:
    links = ["SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_8080_TCP_ADDR"]
    given = {f"MICO_GATEWAY_{link}": "tcp://10.0.0.1:8080" for link in links}
    assert load(None, given | {"MICO_GATEWAY_NAME": "eu-1"}, {}) == GatewayConfig(name="eu-1")
    with pytest.raises(ConfigError, match="unknown setting 'ports'"):
        load(None, {"MICO_GATEWAY_PORTS": "8080"}, {})


def test_each_worker_has_a_name_and_ports_of_its_own_and_knows_those_of_all() -> None:
    config = load(None, {}, {"name": "east", "workers": 3, "outcomes": "seen"})
    workers = [config.of_worker(number) for number in (1, 2, 3)]
    assert [each.name for each in workers] == ["east", "east.2", "east.3"]
    assert [each.grpc_port for each in workers] == [8081, 8083, 8085]
    assert [each.mtls_port for each in workers] == [8082, 8084, 8086]
    assert [each.own_metrics_port for each in workers] == [9080, 9082, 9084]
    assert {each.http_port for each in workers} == {8080}
    assert [each.outcomes is None for each in workers] == [False, True, True]
    assert {each.worker_ports(each.grpc_port) for each in workers} == {(8081, 8083, 8085)}
    alone = load(None, {}, {})
    assert alone.worker_ports(alone.grpc_port) == ()
