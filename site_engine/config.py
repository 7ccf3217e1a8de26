"""The configuration of one site process: what may be set, and what has to agree.

One frozen object; an error names the setting. A secret is never part of its `repr`. Does not read any source:
`config_sources.py` does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

from site_engine.errors import ConfigError
from site_engine.parse import has_host, is_address

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
PRICES = ("input_usd_per_mtok", "cached_usd_per_mtok", "output_usd_per_mtok")
_AT_LEAST_ZERO = (
    "stream_interval_s",
    "iteration_floor_s",
    *PRICES,
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
    token_budget: int | None = None  # of an iteration; absent: 1,024 on a GPU, else 512, at least 2 a slot
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
        require(self.engine in ENGINES, "engine", f"must be one of {', '.join(ENGINES)}")
        for name in ("site", "gateways", "model" if self.engine == "native" else "url"):
            require(bool(getattr(self, name)), name, "must be set")
        for name in ("site", "served_model"):
            value = getattr(self, name)
            named = len(value) <= MAX_NAME_CHARS and value.isprintable()
            require(named, name, f"has at most {MAX_NAME_CHARS} printable characters")
        self._check_server()
        for address in self.gateways:
            require(is_address(address), "gateways", f"has {address!r}, which is not host:port")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"is {value}; it must be at least 1")
        for name, most in _AT_MOST.items():
            value = getattr(self, name)
            require(value is None or value <= most, name, f"is {value}; it is at most {most:,}")
        for name in _AT_LEAST_ZERO:
            value = getattr(self, name)
            valid = value is None or (math.isfinite(value) and value >= 0)
            require(valid, name, f"is {value}; it must be 0 or more")
        by_token = any(getattr(self, name) for name in (*PRICES, "training_usd_per_mtok"))
        require(
            not (self.usd_per_hour and by_token), "usd_per_hour", "and prices per token exclude each other"
        )
        require(
            self.token_budget is None or self.token_budget >= (self.slots or 1) or self.engine != "native",
            "token_budget",
            f"is {self.token_budget}; it must cover one token of each of {self.slots} slots",
        )
        require((self.tls_cert is None) == (self.tls_key is None), "tls_cert", "and tls_key belong together")
        certified = self.tls_ca or self.tls_cert or self.identity
        require(self.tls or not certified, "tls", "is off, but certificates are set")
        require(not (self.identity and self.tls_cert), "identity", "and tls_cert exclude each other")
        joins = bool(self.join_secret or self.join_secret_file)
        require(self.identity is not None or not joins, "join_secret", "is set without identity")
        require(not joins or is_address(self.enrol_at), "enrol_at", "must be host:port, where to join")
        require(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}")
        require(self.log_level in LOG_LEVELS, "log_level", f"must be one of {', '.join(LOG_LEVELS)}")
        self._check_devices()
        self._check_training()
        self._check_training_bounds()
        known = self.sampling_defaults in SAMPLING_DEFAULTS
        require(known, "sampling_defaults", f"must be one of {', '.join(SAMPLING_DEFAULTS)}")

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
        require(bool(found) or not self.key_env, "key_env", f"{self.key_env} is not set")
        return _secret("key_env", found, None)

    def _check_devices(self) -> None:
        require(bool(SLEEPS.fullmatch(self.sleep)), "sleep", "must be disk, host or a GPU, as cuda:1")
        shares = self.share_sleeping_memory
        sleeps_in_place = self.sleep != "disk" and self.kv_tokens is not None
        require(
            not shares or sleeps_in_place,
            "share_sleeping_memory",
            "needs kv_tokens, and sleep on host or a GPU",
        )
        groups = [each.split("+") for each in self.devices or (self.device,)]
        joined = any(len(each) > 1 for each in groups)
        setting = "devices" if self.devices else "device"
        if joined:
            require(not (self.variants or self.models_from), setting, "joined by + serve no variants")
            require(not self.training, setting, "joined by + train nothing")
            require(self.sleep == "disk", "sleep", "must be disk for devices joined by +")
        elif not self.devices:
            return
        require(self.engine == "native", setting, "need the native engine")
        require(not self.devices or self.device == "auto", "device", "and devices exclude each other")
        require(self.engine_process is not False, setting, "need engine_process, which is off")
        names = [name for each in groups for name in each]
        if self.sleep.startswith("cuda"):
            elsewhere = self.sleep not in names and "cpu" not in names
            require(elsewhere, "sleep", f"on {self.sleep} is for a base on other GPUs")
        for each in names:
            known = each == "cpu" or re.fullmatch(r"cuda:\d+", each) is not None
            require(known, setting, f"has {each!r}; name them as cuda:0, cuda:1, cuda:0+cuda:1, or cpu")
            require(each == "cpu" or names.count(each) == 1, setting, f"names {each} twice")
        mixed = next(("+".join(each) for each in groups if 0 < each.count("cpu") < len(each)), "")
        require(not mixed, setting, f"has {mixed}, which are of two kinds")
        alike = len({len(each) for each in groups}) == 1
        require(alike, setting, "have to be alike: as many joined by + in each")

    def _check_training(self) -> None:
        if not self.training:
            require(not self.training_usd_per_mtok, "training_usd_per_mtok", "is set, but training is off")
            return
        require(self.engine == "native", "training", "needs the native engine: a server trains nothing here")
        can_share = not self.separates_engine or hasattr(os, "memfd_create")
        require(can_share, "training", "with an engine in a process of its own needs Linux")

    def _check_training_bounds(self) -> None:
        for each in fields(self):
            changed = each.name.startswith("training_") and getattr(self, each.name) != each.default
            require(self.training or not changed, each.name, "is set, but training is off")
        bound_s = self.training_between_tokens_s
        valid = math.isfinite(bound_s) and bound_s > 0
        require(valid, "training_between_tokens_s", f"is {bound_s}; it must be more than 0")
        share = self.training_least_share
        require(0 <= share < 1, "training_least_share", f"is {share}; it must be 0 or more, and less than 1")
        known = self.training_deferral in DEFERRALS
        require(known, "training_deferral", f"must be one of {', '.join(DEFERRALS)}")

    def _check_server(self) -> None:
        for each in self.features:
            require(each in FEATURES, "features", f"has {each!r}; there are {', '.join(FEATURES)}")
        if self.engine == "native":
            for name in ("url", "features", "allow_image_urls"):
                require(not getattr(self, name), name, 'is set, but engine is native; set engine = "openai"')
            for folder in self.models_from:
                known = Path(folder).is_absolute() or re.fullmatch(rf"{HUB}[\w.-]+/[\w.-]*", folder)
                require(bool(known), "models_from", f"has {folder!r}, neither a full path nor {HUB}NAME/")
            return
        require(not (self.variants or self.models_from), "group", "and models_from need the native engine")
        require(self.url.startswith(("http://", "https://")), "url", "must begin with http:// or https://")
        require("@" not in self.url, "url", "must not carry a password; use key_env or key_file")
        require(has_host(self.url), "url", f"has no host, or a port that is no number: {self.url}")
        require(not (self.key_env and self.key_file), "key_env", "and key_file exclude each other")


def _secret(name: str, text: str, file: Path | None) -> str:
    """Return a secret, from its file if there is one. Raises ConfigError for what no header can have."""
    try:
        secret = (text if file is None else file.read_text("utf-8")).strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{name}_file cannot be read: {exc}") from exc
    name = name if file is None else f"{name}_file"
    require(bool(secret) or file is None, name, f"{file} is empty")
    require(secret.isascii() and secret.isprintable(), name, "is not one line of ASCII characters")
    return secret


def require(holds: bool, name: str, complaint: str) -> None:
    """Raise ConfigError, which says what is wrong with a setting, unless something holds."""
    if not holds:
        raise ConfigError(f"{name} {complaint}")
