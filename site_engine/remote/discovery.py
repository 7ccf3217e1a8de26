"""Discover a server: its models and their contexts, its dialect, and the metrics or probe to watch it by."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from site_engine.config import SLOTS, SiteConfig
from site_engine.errors import ConfigError
from site_engine.messages import Model
from site_engine.remote.dialects import OLLAMA, UNKNOWN, Dialect, recognize
from site_engine.remote.engine import ServerProfile
from site_engine.remote.listing import (
    MAX_NAME_CHARS,
    Card,
    identity,
    max_context_tokens,
    read_cards,
    select_models,
    slot_context_tokens,
    to_models,
)
from site_engine.remote.ollama import describe, is_ollama
from site_engine.remote.prometheus import Sample, ServerLoad, UnknownMetrics, parse_metrics, server_load
from site_engine.remote.server import Server, ServerLost

log = logging.getLogger(__name__)

MAX_KV_TOKENS = 2**32 - 1
"""Messages take no more."""
MODELS_PATH, METRICS_PATH, HEALTH_PATH = "/v1/models", "/metrics", "/health"


@dataclass(frozen=True, slots=True)
class Discovery:
    """`load_source` describes the origin of load figures; `probe` is the path that shows the server alive.

    `about` is the server's page about itself; `listed` tells its list of models from another.
    """

    profile: ServerProfile
    models: tuple[Model, ...]
    load_source: str
    probe: str
    has_metrics: bool
    about: Mapping[str, Any]
    listed: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Metrics:
    """The metrics as they were found: `load` is None where they are of no use, for `reason`. `may_come`: a
    server exports some once it has answered, as TGI does.
    """

    dialect: Dialect
    load: ServerLoad | None
    reason: str = ""
    may_come: bool = False


async def discover(server: Server, config: SiteConfig) -> Discovery:
    """Discover the server. Raises ServerLost while it is away, ConfigError if waiting won't help."""
    health, _ = await server.get(HEALTH_PATH)
    if health == 503:  # llama.cpp, which lists its models already, but without their contexts
        raise ServerLost(f"{server.root}{HEALTH_PATH} answers {health}: it loads")
    cards = await list_models(server, config, healthy=health == 200)
    metrics = await find_metrics(server, cards, config)
    dialect = metrics.dialect
    slots = config.slots or SLOTS
    profile = ServerProfile(
        models={},
        dialect=dialect,
        context_tokens=0,
        kv_capacity_tokens=config.kv_tokens or (metrics.load and metrics.load.kv_capacity_tokens) or 0,
        slots=slots,
        max_pending=config.max_pending,
        requests_per_min=config.requests_per_min,
        tokens_per_min=config.tokens_per_min,
    )
    found = Discovery(
        profile,
        models=(),
        load_source="its metrics" if metrics.load else f"an estimate: {metrics.reason}",
        probe=HEALTH_PATH if health == 200 else dialect.alive_path or MODELS_PATH,
        has_metrics=metrics.load is not None or metrics.may_come,
        about=await fetch_about(server, dialect),
        listed=(),
    )
    found = await with_models(found, server, cards, config)
    if not profile.kv_capacity_tokens:
        capacity = min(MAX_KV_TOKENS, slots * found.profile.context_tokens)
        found = replace(found, profile=replace(found.profile, kv_capacity_tokens=capacity))
    return found


async def refresh(server: Server, config: SiteConfig, found: Discovery) -> Discovery:
    """Return the discovery with the models that the server lists now; `found` itself if they are the same.

    Adapters come and go while a server runs. Raises ServerLost, and ConfigError where none can be served.
    """
    status, body = await server.get(MODELS_PATH)
    if status >= 500:
        raise ServerLost(f"{server.root}{MODELS_PATH} answers {status}")
    cards = read_cards(status, body)
    if not cards or identity(cards) == found.listed:
        return found
    about = await fetch_about(server, found.profile.dialect) or found.about
    return await with_models(replace(found, about=about), server, cards, config)


async def with_models(found: Discovery, server: Server, cards: list[Card], config: SiteConfig) -> Discovery:
    """Replace the models of a discovery by those of the cards. Raises ServerLost, ConfigError."""
    dialect = found.profile.dialect
    wanted, kept_out = select_models(cards, config)
    for name, reason in kept_out.items():
        log.warning("%r of the server is not served: %s", name[:MAX_NAME_CHARS], reason)
    if not wanted:
        raise ConfigError(f"none of the server's {len(cards)} models can be served")
    if dialect is OLLAMA:
        wanted = await describe(server, wanted)
    if slot_tokens := slot_context_tokens(found.about):
        wanted = [{**each, "context_tokens": slot_tokens} for each in wanted]
    models = to_models(wanted, dialect, found.about, config, {each.id: each for each in found.models})
    profile = replace(
        found.profile,
        models={model.id: str(card["id"]) for model, card in zip(models, wanted, strict=True)},
        context_tokens=min(each.context_tokens for each in models),
        max_prompt_tokens=max_context_tokens(wanted, config),
    )
    return replace(found, profile=profile, models=models, listed=identity(cards))


async def fetch_load(server: Server, dialect: Dialect) -> ServerLoad:
    """Read the server's metrics. Raises ServerLost, UnknownMetrics."""
    status, body = await server.get(METRICS_PATH)
    if status >= 500:
        raise ServerLost(f"{server.root}{METRICS_PATH} answers {status}")
    if status != 200 or dialect.metric_names is None:
        raise UnknownMetrics(f"{METRICS_PATH} answers {status}")
    return server_load(parse_metrics(body.decode(errors="replace")), dialect.metric_names)


async def fetch_about(server: Server, dialect: Dialect) -> dict[str, Any]:
    """Read the page on which servers of this kind describe their model; empty where there is none."""
    if not dialect.about_path:
        return {}
    status, body = await server.get(dialect.about_path)
    try:
        found = json.loads(body) if status == 200 else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


async def check_alive(server: Server, path: str) -> None:
    """Raise ServerLost unless the server is alive. A refusal is a sign of life, a fault is not."""
    status, _ = await server.get(path)
    if status >= 500:
        raise ServerLost(f"{server.root}{path} answers {status}")


async def list_models(server: Server, config: SiteConfig, *, healthy: bool) -> list[Card]:
    status, body = await server.get(MODELS_PATH)
    if status in {401, 403}:
        raise ConfigError(f"the server at {server.root} wants a key ({status}); set key_env or key_file")
    listed = read_cards(status, body)
    if not listed and healthy and config.model:
        log.warning(
            "the server lists no models (%s answers %d): %s is taken", MODELS_PATH, status, config.model
        )
        return [{"id": config.model}]
    if not listed:
        raise ServerLost(f"{server.root}{MODELS_PATH} answers {status} and lists no models")
    return listed


async def find_metrics(server: Server, listed: list[Card], config: SiteConfig) -> _Metrics:
    owners = {str(each.get("owned_by")) for each in listed}
    status, body = await server.get(METRICS_PATH) if config.metrics else (0, b"")
    samples = parse_metrics(body.decode(errors="replace")) if status == 200 else {}
    dialect = recognize(owners, samples)
    if dialect is UNKNOWN and await is_ollama(server):
        dialect = OLLAMA
    if not config.metrics:
        return _Metrics(dialect, None, "metrics is off")
    metrics = read_metrics(dialect, samples, status)
    if metrics.load is None:
        log.warning("load is estimated from what passes through: %s", metrics.reason)
    return metrics


def read_metrics(dialect: Dialect, samples: dict[str, list[Sample]], status: int) -> _Metrics:
    if status != 200:
        return _Metrics(dialect, None, f"{METRICS_PATH} answers {status}")
    if dialect.metric_names is None:
        names = ", ".join(list(samples)[:3]) or "nothing"
        return _Metrics(dialect, None, f"nothing on {METRICS_PATH} is known here (it has {names})")
    try:
        return _Metrics(dialect, server_load(samples, dialect.metric_names))
    except UnknownMetrics as exc:
        return _Metrics(dialect, None, f"the metrics of {dialect.name} lack one: {exc}", may_come=True)
