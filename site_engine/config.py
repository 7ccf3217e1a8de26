"""The configuration of one site process: a TOML file, then MICO_SITE_* of the environment, then keywords.

One frozen object; an error names the setting. A secret is never part of its `repr`.
"""

from __future__ import annotations

import math
import os
import re
import socket
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from site_engine.errors import ConfigError
from site_engine.parse import BY_TYPE, has_host, is_address, parse_devices, parse_source

PREFIX = "MICO_SITE_"
SLOTS = 32
"""Default without a GPU."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
ENGINES = ("native", "openai")
SAMPLING_DEFAULTS = ("model", "openai")
SLEEPS = re.compile(r"disk|host|cuda:\d+")
DEFERRALS = ("slice", "iteration")
FEATURES = ("chat", "vision", "embed", "rerank")
NVIDIA = Path("/dev/nvidiactl")
"""Is there where a process can use a GPU."""
HUB = "hf:"  # before what the Hugging Face Hub has
_AT_LEAST_ONE = (
    "slots",
    "token_budget",
    "page_size",
    "max_pending",
    "kv_tokens",
    "threads",
    "context_tokens",
    "requests_per_min",
    "tokens_per_min",
)
_AT_MOST = {"slots": 65_536, "threads": 4_096, "context_tokens": 100_000_000, "kv_tokens": 2**32 - 1}
"""A larger value is a slip: memory is laid out for it at the start, or no gateway takes it."""
_PRICES = ("input_usd_per_mtok", "cached_usd_per_mtok", "output_usd_per_mtok")
_OF_GROUPS = ("served_model", "kv_tokens", "slots", *_PRICES)
"""Settings that a group may have of its own, before those of its site."""
_AT_LEAST_ZERO = (
    "stream_interval_s",
    "iteration_floor_s",
    *_PRICES,
    "training_usd_per_mtok",
    "usd_per_hour",
    "drain_s",
    "silence_s",
)


MAX_NAME_CHARS = 200
"""Of a model or a site; gateways take no longer names."""


class VariantConfig(NamedTuple):
    """A variant of the model: a folder with an adapter of it, or with a fine-tuned model like it."""

    id: str
    adapter: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """Without `tls`, links are plain text: for one machine or a private network."""

    site: str  # unique among the sites, stable over restarts; absent: the pool's name and the machine's
    pool: str = ""  # of alike machines, of which the gateway may have more or fewer
    cloud: str = "on-prem"
    region: str = "local"
    gateways: tuple[str, ...]  # host:port of every gateway known; the others are learned from these
    token: str = field(default="", repr=False)
    token_file: Path | None = None  # read instead of `token`
    tls: bool = False  # with the system's authorities, unless tls_ca names others
    tls_ca: Path | None = None
    tls_cert: Path | None = None  # with tls_key: the identity of this site, instead of a token
    tls_key: Path | None = None
    identity: Path | None = None  # a folder: the site makes its key there and gets its certificates itself
    enrol_at: str = ""  # host:port that issues the first one; `gateways` then take certificates
    join_secret: str = field(default="", repr=False)  # authorizes the request, made by `mico pki invite`
    join_secret_file: Path | None = None

    engine: str = "native"  # or openai: a server that runs already, at `url`
    url: str = ""  # of that server, with or without /v1
    key_env: str = ""  # the environment variable that holds the server's key
    key_file: Path | None = None  # read instead
    context_tokens: int | None = None  # of the server's models, where it does not say
    features: tuple[str, ...] = ()  # of its models, where it does not say: chat, vision, embed, rerank
    allow_image_urls: bool = False  # let clients make the server fetch images from addresses that they name
    metrics: bool = True  # whether to read its load from its metrics; off behind a load balancer
    silence_s: float = 120.0  # of a server within an answer, after which it has hung
    requests_per_min: int | None = None  # a provider's limit
    tokens_per_min: int | None = None

    model: str = ""  # a folder or a Hub id; of a server: one of its models, empty for all
    variants: tuple[VariantConfig, ...] = ()  # of the model, by [[group.variant]]
    models_from: tuple[str, ...] = ()  # folders, hf:NAME/: whence alone operators' orders load variants
    training: bool = False  # let tenants fine-tune adapters of the model, in the time that chats leave
    training_between_tokens_s: float = 0.02  # the bound up to which training fills the time between tokens
    training_least_share: float = 0.0  # of the device's time, that training has whatever is served
    training_deferral: str = "slice"  # or iteration, MICO's rule: whole micro-batches, and beside nothing
    engine_process: bool | None = None  # run the engine in a process of its own; absent: on a GPU
    served_model: str = ""  # its name for clients; empty: the model's own name
    device: str = "auto"  # auto: a GPU if there is one
    devices: tuple[str, ...] = ()  # an engine for each, as cuda:0, or for several together, as cuda:0+cuda:1
    sleep: str = "disk"  # where the weights are while the base sleeps: disk, host, or a GPU, as cuda:1
    share_sleeping_memory: bool = False  # lend a sleeping base's memory to the KV caches of bases awake there
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on a CPU
    threads: int | None = None  # of the CPU for the model; absent: all cores
    slots: int | None = None  # requests that run at once; absent: 256 on a GPU, else 32
    token_budget: int | None = None  # tokens of one iteration; absent: 8,192 on a GPU, else 512, or `slots`
    page_size: int = 16  # tokens in a page of keys and values
    kv_tokens: int | None = None  # room for keys and values; absent: measured
    max_pending: int = 1024
    share_prefixes: bool = False  # between tenants too: faster, but times then reveal prompts of others
    allow_special_tokens: bool = False  # read the names of control tokens in the messages of chats as those
    sampling_defaults: str = "model"  # for what a client leaves out: its generation_config.json, or OpenAI's
    stream_interval_s: float = 0.02  # longest that text waits for the next, while the site is busy
    iteration_floor_s: float = 0.0  # makes a site slower than its machine

    input_usd_per_mtok: float = 0.0
    output_usd_per_mtok: float = 0.0
    cached_usd_per_mtok: float | None = None  # of input that it had computed before; absent: as any input
    training_usd_per_mtok: float = 0.0  # of trained tokens
    usd_per_hour: float = 0.0  # of a site that is paid by the hour, busy or idle, instead of by tokens
    drain_s: float = 25.0  # how long running answers may take when the process is told to end
    log_level: str = "info"
    otlp_url: str = ""  # collector of traces, such as http://collector:4318. Needs the extra otel

    def __post_init__(self) -> None:
        _require(self.engine in ENGINES, "engine", f"must be one of {', '.join(ENGINES)}")
        for name in ("site", "gateways", "model" if self.engine == "native" else "url"):
            _require(bool(getattr(self, name)), name, "must be set")
        for name in ("site", "served_model"):
            value = getattr(self, name)
            named = len(value) <= MAX_NAME_CHARS and value.isprintable()
            _require(named, name, f"has at most {MAX_NAME_CHARS} printable characters")
        self._check_server()
        for address in self.gateways:
            _require(is_address(address), "gateways", f"has {address!r}, which is not host:port")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            _require(value is None or value >= 1, name, f"is {value}; it must be at least 1")
        for name, most in _AT_MOST.items():
            value = getattr(self, name)
            _require(value is None or value <= most, name, f"is {value}; it is at most {most:,}")
        for name in _AT_LEAST_ZERO:
            value = getattr(self, name)
            valid = value is None or (math.isfinite(value) and value >= 0)
            _require(valid, name, f"is {value}; it must be 0 or more")
        by_token = any(getattr(self, name) for name in (*_PRICES, "training_usd_per_mtok"))
        _require(
            not (self.usd_per_hour and by_token), "usd_per_hour", "and prices per token exclude each other"
        )
        _require(
            self.token_budget is None or self.token_budget >= (self.slots or 1) or self.engine != "native",
            "token_budget",
            f"is {self.token_budget}; it must cover one token of each of {self.slots} slots",
        )
        _require((self.tls_cert is None) == (self.tls_key is None), "tls_cert", "and tls_key belong together")
        certified = self.tls_ca or self.tls_cert or self.identity
        _require(self.tls or not certified, "tls", "is off, but certificates are set")
        _require(not (self.identity and self.tls_cert), "identity", "and tls_cert exclude each other")
        joins = bool(self.join_secret or self.join_secret_file)
        _require(self.identity is not None or not joins, "join_secret", "is set without identity")
        _require(not joins or is_address(self.enrol_at), "enrol_at", "must be host:port, where to join")
        _require(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}")
        _require(self.log_level in LOG_LEVELS, "log_level", f"must be one of {', '.join(LOG_LEVELS)}")
        self._check_devices()
        self._check_training()
        self._check_training_bounds()
        known = self.sampling_defaults in SAMPLING_DEFAULTS
        _require(known, "sampling_defaults", f"must be one of {', '.join(SAMPLING_DEFAULTS)}")

    @property
    def separates_engine(self) -> bool:
        """Whether the engine runs in a process of its own."""
        if self.engine != "native":
            return False
        if self.engine_process is not None or self.devices or "+" in self.device:
            return self.engine_process is not False
        return self.on_gpu

    @property
    def on_gpu(self) -> bool:
        """Whether a device is a GPU. No library is asked for one: in the site's process that would take hold
        of it.
        """
        devices = self.devices or self.device.split("+")
        return any(each.startswith("cuda") or (each == "auto" and NVIDIA.exists()) for each in devices)

    def secret(self) -> str:
        """Return the token, from its file if there is one. Raises ConfigError, as the next two do."""
        return _secret("token", self.token, self.token_file)

    def invitation(self) -> str:
        """Return the join secret, empty if there is none."""
        return _secret("join_secret", self.join_secret, self.join_secret_file)

    def server_key(self, environ: Mapping[str, str]) -> str:
        """Return the server's key, empty if none is configured."""
        if self.key_file is not None:
            return _secret("key", "", self.key_file)
        found = environ.get(self.key_env, "") if self.key_env else ""
        _require(bool(found) or not self.key_env, "key_env", f"{self.key_env} is not set")
        return _secret("key_env", found, None)

    def _check_devices(self) -> None:
        _require(bool(SLEEPS.fullmatch(self.sleep)), "sleep", "must be disk, host or a GPU, as cuda:1")
        shares = self.share_sleeping_memory
        sleeps_in_place = self.sleep != "disk" and self.kv_tokens is not None
        _require(
            not shares or sleeps_in_place,
            "share_sleeping_memory",
            "needs kv_tokens, and sleep on host or a GPU",
        )
        groups = [each.split("+") for each in self.devices or (self.device,)]
        joined = any(len(each) > 1 for each in groups)
        setting = "devices" if self.devices else "device"
        if joined:
            _require(not (self.variants or self.models_from), setting, "joined by + serve no variants")
            _require(not self.training, setting, "joined by + train nothing")
            _require(self.sleep == "disk", "sleep", "must be disk for devices joined by +")
        elif not self.devices:
            return
        _require(self.engine == "native", setting, "need the native engine")
        _require(not self.devices or self.device == "auto", "device", "and devices exclude each other")
        _require(self.engine_process is not False, setting, "need engine_process, which is off")
        names = [name for each in groups for name in each]
        if self.sleep.startswith("cuda"):
            elsewhere = self.sleep not in names and "cpu" not in names
            _require(elsewhere, "sleep", f"on {self.sleep} is for a base on other GPUs")
        for each in names:
            known = each == "cpu" or re.fullmatch(r"cuda:\d+", each) is not None
            _require(known, setting, f"has {each!r}; name them as cuda:0, cuda:1, cuda:0+cuda:1, or cpu")
            _require(each == "cpu" or names.count(each) == 1, setting, f"names {each} twice")
        mixed = next(("+".join(each) for each in groups if 0 < each.count("cpu") < len(each)), "")
        _require(not mixed, setting, f"has {mixed}, which are of two kinds")
        alike = len({len(each) for each in groups}) == 1
        _require(alike, setting, "have to be alike: as many joined by + in each")

    def _check_training(self) -> None:
        if not self.training:
            _require(not self.training_usd_per_mtok, "training_usd_per_mtok", "is set, but training is off")
            return
        _require(self.engine == "native", "training", "needs the native engine: a server trains nothing here")
        can_share = not self.separates_engine or hasattr(os, "memfd_create")
        _require(can_share, "training", "with an engine in a process of its own needs Linux")

    def _check_training_bounds(self) -> None:
        for each in fields(self):
            changed = each.name.startswith("training_") and getattr(self, each.name) != each.default
            _require(self.training or not changed, each.name, "is set, but training is off")
        bound_s = self.training_between_tokens_s
        valid = math.isfinite(bound_s) and bound_s > 0
        _require(valid, "training_between_tokens_s", f"is {bound_s}; it must be more than 0")
        share = self.training_least_share
        _require(0 <= share < 1, "training_least_share", f"is {share}; it must be 0 or more, and less than 1")
        known = self.training_deferral in DEFERRALS
        _require(known, "training_deferral", f"must be one of {', '.join(DEFERRALS)}")

    def _check_server(self) -> None:
        for each in self.features:
            _require(each in FEATURES, "features", f"has {each!r}; there are {', '.join(FEATURES)}")
        if self.engine == "native":
            for name in ("url", "features", "allow_image_urls"):
                _require(not getattr(self, name), name, 'is set, but engine is native; set engine = "openai"')
            for folder in self.models_from:
                known = Path(folder).is_absolute() or re.fullmatch(rf"{HUB}[\w.-]+/[\w.-]*", folder)
                _require(bool(known), "models_from", f"has {folder!r}, neither a full path nor {HUB}NAME/")
            return
        _require(not (self.variants or self.models_from), "group", "and models_from need the native engine")
        _require(self.url.startswith(("http://", "https://")), "url", "must begin with http:// or https://")
        _require("@" not in self.url, "url", "must not carry a password; use key_env or key_file")
        _require(has_host(self.url), "url", f"has no host, or a port that is no number: {self.url}")
        _require(not (self.key_env and self.key_file), "key_env", "and key_file exclude each other")


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
    _require(engine in ENGINES, "engine", f"must be one of {', '.join(ENGINES)}")
    engine_of = "url" if engine != "native" else "model"
    missing = [name for name in ("site", "gateways", engine_of) if name not in settings]
    if missing:
        names = ", ".join(f"{name} ({PREFIX}{name.upper()})" for name in missing)
        raise ConfigError(f"not set: {names}; a file (--config), --set name=value or the variable sets it")
    sleeps = bool(settings.get("devices")) or settings.get("sleep", "disk") == "disk"
    _require(sleeps, "sleep", "is set, but the base sleeps only where devices is set")
    return SiteConfig(**settings)


def _groups(value: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the settings that each [[group]] of a file makes. Raises ConfigError."""
    groups = _tables(value, "group", ("name", "model", "variant", *_OF_GROUPS))
    for name in ("model", "served_model"):
        _require(name not in given, name, "is set beside [[group]], which has its own")
    made: dict[str, dict[str, Any]] = {}
    for group in groups:
        name = str(group.get("name", ""))
        _require(
            bool(name) and name.isprintable() and "/" not in name, "group.name", "must be set, without /"
        )
        _require(name not in made, "group.name", f"{name} is there twice")
        _require(bool(group.get("model")), "group.model", "must be set")
        own = {each: group[each] for each in ("model", *_OF_GROUPS) if each in group}
        variants = _variants(group.get("variant", []))
        made[name] = {"group": name, "variants": variants, **_parsed(own, f"group {name}")}
    _require(bool(made), "group", "is empty")
    return tuple(made.values())


def _check_shared(settings: Mapping[str, Any], groups: Collection[Mapping[str, Any]]) -> None:
    """Check the settings that groups of one process share. Raises ConfigError."""
    for name in ("identity", "tls_cert", "pool"):
        whose = "is of one site" if name != "pool" else "counts machines by their sites"
        _require(name not in settings, name, f"{whose}: run a process for each [[group]]")
    _require("devices" not in settings, "devices", "are of one [[group]]: run a process for each")
    for group in groups:
        has_kv = bool(group.get("kv_tokens"))
        _require(has_kv, f"group {group['group']}", "needs kv_tokens: groups of a process share one device")


def _variants(value: Any) -> tuple[VariantConfig, ...]:
    found: dict[str, VariantConfig] = {}
    for table in _tables(value, "group.variant", VariantConfig._fields):
        own = {key: _parsed_as(parse_source, f"group.variant.{key}", each) for key, each in table.items()}
        variant = VariantConfig(**{"id": "", **own})
        named = 0 < len(variant.id) <= MAX_NAME_CHARS and variant.id.isprintable()
        _require(named, "group.variant", f"has an id that is not 1 to {MAX_NAME_CHARS} printable characters")
        _require(variant.id not in found, "group.variant", f"names {variant.id} twice")
        one = bool(variant.adapter) != bool(variant.model)
        _require(one, "group.variant", f"{variant.id} needs one of adapter and model")
        found[variant.id] = variant
    return tuple(found.values())


def _tables(value: Any, name: str, known: Collection[str]) -> list[dict[str, Any]]:
    """Return tables of a file. Raises ConfigError for anything else, and for a name that is not known."""
    tables = value if isinstance(value, list) else [value]
    for table in tables:
        _require(isinstance(table, dict), name, f"must be a table: [[{name}]]")
        for key in table:
            _require(key in known, f"{name}.{key}", f"is unknown; there are {', '.join(known)}")
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


def _secret(name: str, text: str, file: Path | None) -> str:
    """Return a secret, from its file if there is one. Raises ConfigError for what no header can have."""
    try:
        secret = (text if file is None else file.read_text("utf-8")).strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name}_file cannot be read: {exc}") from exc
    name = name if file is None else f"{name}_file"
    _require(bool(secret) or file is None, name, f"{file} is empty")
    _require(secret.isascii() and secret.isprintable(), name, "is not one line of ASCII characters")
    return secret


def _require(holds: bool, name: str, complaint: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {complaint}")
