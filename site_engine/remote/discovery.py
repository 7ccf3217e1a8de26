"""What a server is: its models and their contexts, whose kind it is of, and what of it can be watched."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from site_engine.config import SLOTS, SiteConfig
from site_engine.errors import ConfigError
from site_engine.messages import Model
from site_engine.remote.dialects import Dialect, recognized
from site_engine.remote.engine import Terms
from site_engine.remote.prometheus import Busy, Sample, UnknownPage, busy, samples
from site_engine.remote.server import Server, ServerLost

log = logging.getLogger(__name__)

MODELS_PATH, METRICS_PATH, HEALTH_PATH = "/v1/models", "/metrics", "/health"
DEFAULT_CONTEXT_TOKENS = 8192
MODELS_MAX = 200


@dataclass(frozen=True, slots=True)
class Found:
    """`source` says in words where load figures come from; `probe` is the path that shows it alive."""

    terms: Terms
    models: tuple[Model, ...]
    source: str
    probe: str
    has_metrics: bool


@dataclass(frozen=True, slots=True)
class _Page:
    """The metrics page as it was found: `busy` is None where it tells nothing, `why` says so."""

    dialect: Dialect
    busy: Busy | None
    why: str


async def discover(server: Server, config: SiteConfig) -> Found:
    """Raises ServerLost while it is not there, ConfigError for what waiting won't mend."""
    health, _ = await server.get(HEALTH_PATH)
    listed = await _listed(server, config, healthy=health == 200)
    wanted = _wanted(listed, config)
    page = await _page(server, listed, config)
    models = tuple(_model(each, page.dialect, config) for each in wanted)
    context_tokens = min(each.context_tokens for each in models)
    source = "its metrics" if page.busy else f"an estimate: {page.why}"
    slots = config.slots or SLOTS
    capacity = config.kv_tokens or (page.busy and page.busy.kv_capacity_tokens)
    terms = Terms(
        models={told.id: str(each["id"]) for told, each in zip(models, wanted, strict=True)},
        dialect=page.dialect,
        context_tokens=context_tokens,
        kv_capacity_tokens=capacity or slots * context_tokens,
        slots=slots,
        max_pending=config.max_pending,
        longest_prompt_tokens=_longest(wanted, config),
        requests_per_min=config.requests_per_min,
        tokens_per_min=config.tokens_per_min,
    )
    probe = HEALTH_PATH if health == 200 else MODELS_PATH
    return Found(terms, models, source, probe, page.busy is not None)


async def fetch_load(server: Server, dialect: Dialect) -> Busy:
    """Read the server's metrics. Raises ServerLost, UnknownPage."""
    status, body = await server.get(METRICS_PATH)
    if status >= 500:
        raise ServerLost(f"{server.root}{METRICS_PATH} answers {status}")
    if status != 200 or dialect.names is None:
        raise UnknownPage(f"{METRICS_PATH} answers {status}")
    return busy(samples(body.decode(errors="replace")), dialect.names)


async def check_alive(server: Server, path: str) -> None:
    """Raise ServerLost unless the server is alive. A refusal is a sign of life, a fault is not."""
    status, _ = await server.get(path)
    if status >= 500:
        raise ServerLost(f"{server.root}{path} answers {status}")


async def _listed(server: Server, config: SiteConfig, *, healthy: bool) -> list[dict[str, Any]]:
    status, body = await server.get(MODELS_PATH)
    if status in {401, 403}:
        raise ConfigError(f"the server at {server.root} wants a key ({status}); set key_env or key_file")
    try:
        data = json.loads(body)["data"] if status == 200 else []
        listed = [each for each in data if isinstance(each, dict) and each.get("id")]
    except (ValueError, KeyError, TypeError):
        listed = []
    if not listed and healthy and config.model:
        log.warning(
            "the server lists no models (%s answers %d): %s is taken", MODELS_PATH, status, config.model
        )
        return [{"id": config.model}]
    if not listed:
        raise ServerLost(f"{server.root}{MODELS_PATH} answers {status} and lists no models")
    return listed


def _wanted(listed: list[dict[str, Any]], config: SiteConfig) -> list[dict[str, Any]]:
    ids = [str(each["id"]) for each in listed]
    wanted = [each for each in listed if config.model in {"", each["id"]}]
    if not wanted:
        raise ConfigError(f"model is {config.model!r}, but the server has {', '.join(ids[:20])}")
    if len(wanted) > MODELS_MAX:
        raise ConfigError(f"model must be set: the server has {len(ids)} models")
    if config.served_model and len(wanted) > 1:
        raise ConfigError(f"served_model names one model; set model to one of {', '.join(ids[:20])}")
    return wanted


async def _page(server: Server, listed: list[dict[str, Any]], config: SiteConfig) -> _Page:
    owners = {str(each.get("owned_by")) for each in listed}
    if not config.metrics:
        return _Page(recognized(owners, ()), None, "metrics is off")
    status, body = await server.get(METRICS_PATH)
    page = samples(body.decode(errors="replace")) if status == 200 else {}
    dialect = recognized(owners, page)
    told, why = _told(dialect, page, status)
    if told is None:
        log.warning("load is estimated from what passes through: %s", why)
    return _Page(dialect, told, why)


def _told(dialect: Dialect, page: dict[str, list[Sample]], status: int) -> tuple[Busy | None, str]:
    if status != 200:
        return None, f"{METRICS_PATH} answers {status}"
    if dialect.names is None:
        return (
            None,
            f"nothing on {METRICS_PATH} is known here (it has {', '.join(list(page)[:3]) or 'nothing'})",
        )
    try:
        return busy(page, dialect.names), ""
    except UnknownPage as exc:
        return None, f"the metrics of {dialect.name} have changed: {exc}"


def _model(listed: dict[str, Any], dialect: Dialect, config: SiteConfig) -> Model:
    context_tokens = config.context_tokens or _context(listed)
    if context_tokens is None:
        context_tokens = DEFAULT_CONTEXT_TOKENS
        log.warning("the server does not say the context of %s: %d", listed["id"], context_tokens)
    return Model(
        id=config.served_model or str(listed["id"]),
        revision=str(listed.get("root") or listed["id"]),
        context_tokens=context_tokens,
        created_s=int(listed["created"]) if isinstance(listed.get("created"), int) else int(time.time()),
        features=dialect.features,
    )


def _longest(wanted: list[dict[str, Any]], config: SiteConfig) -> int | None:
    """The longest context of any model; None where it was only assumed."""
    said = [config.context_tokens or _context(each) for each in wanted]
    return max((each for each in said if each is not None), default=None) if all(said) else None


def _context(listed: dict[str, Any]) -> int | None:
    """As vLLM and SGLang, our own gateway, providers, and llama.cpp say it."""
    meta = listed.get("meta") if isinstance(listed.get("meta"), dict) else {}
    said = (
        listed.get("max_model_len"),
        listed.get("context_tokens"),
        listed.get("context_length"),
        (meta or {}).get("n_ctx"),
        (meta or {}).get("n_ctx_train"),
    )
    return next((each for each in said if isinstance(each, int) and each > 0), None)
