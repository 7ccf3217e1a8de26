"""The models that a server lists, as the site serves them: bases, and the adapters that it has loaded. Pure.

Adapters name their `parent`, as vLLM, SGLang and gateways of this project write it. What a card of theirs
leaves out, such as the context, is that of the parent.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
from site_engine.messages import Model
from site_engine.remote.abilities import model_features
from site_engine.remote.dialects import Dialect

log = logging.getLogger(__name__)

DEFAULT_CONTEXT_TOKENS = 8192
MAX_MODELS = 200
"""Without adapters: who has more is a provider, of which the operator chooses a model."""
MAX_ADAPTERS = 5_000
MAX_NAME_CHARS = 200
"""Gateways take no longer names."""
MAX_CONTEXT_TOKENS = 100_000_000
"""Gateways take no longer contexts."""
MAX_UNIX_S = 2**40
"""A later time of creation is none."""

Card: TypeAlias = dict[str, Any]
"""A model as a server describes it."""


class Selection(NamedTuple):
    """The cards of the models that are served, and of others why they are not, by name."""

    cards: list[Card]
    kept_out: dict[str, str]


def read_cards(status: int, body: bytes) -> list[Card]:
    """Return the cards with an id on a page of models, empty if it is no such page."""
    try:
        data = json.loads(body)["data"] if status == 200 else []
        cards = [each for each in data if isinstance(each, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [each for each in cards if each.get("id") and isinstance(each["id"], str)]


def identity(cards: Iterable[Card]) -> tuple[tuple[str, ...], ...]:
    """Return what tells one list from another. vLLM writes into each card when it was read."""
    names = ("id", "root", "parent", "features")
    return tuple((*(str(card.get(name)) for name in names), str(context_tokens_of(card))) for card in cards)


def select_models(listed: Sequence[Card], config: SiteConfig) -> Selection:
    """Select the model that the configuration names, or all. Raises ConfigError."""
    by_id = {str(card["id"]): card for card in listed}
    wanted = [_whole(card, by_id) for card in listed if config.model in {"", card["id"]}]
    bases = [card for card in wanted if not parent_of(card)]
    names = ", ".join(list(by_id)[:20])
    if not wanted:
        raise ConfigError(f"model is {config.model!r}, but the server has {names}")
    if len(bases) > MAX_MODELS:
        raise ConfigError(f"model must be set: the server has {len(bases)} models")
    if config.served_model and len(bases) > 1:
        raise ConfigError(f"served_model names one model; set model to one of {names}")
    cards: dict[str, Card] = {}
    kept_out: dict[str, str] = {}
    for card in (*bases, *(each for each in wanted if parent_of(each))):
        name = served_name(card, config)
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            kept_out[name] = f"a name has 1 to {MAX_NAME_CHARS} printable characters"
        elif name in cards:
            kept_out[name] = f"{cards[name].get('root') or cards[name]['id']} is served by this name already"
        elif len(cards) >= len(bases) + MAX_ADAPTERS:
            kept_out[name] = f"{MAX_ADAPTERS} adapters are served already"
        else:
            cards[name] = card
    return Selection(list(cards.values()), kept_out)


def _whole(card: Card, by_id: Mapping[str, Card]) -> Card:
    """Return a card, completed by fields of its parent's card that its own leaves out."""
    own = {name: value for name, value in card.items() if value is not None}
    return {**by_id.get(parent_of(card), {}), **own}


def parent_of(card: Card) -> str:
    """Return the server's name of the model that this adapter is of; empty for a model that is no adapter."""
    parent = card.get("parent")
    return parent if isinstance(parent, str) and parent != card["id"] else ""


def served_name(card: Card, config: SiteConfig) -> str:
    """Return the name for clients. `served_model` names the only base, or the model that is configured."""
    renamed = config.served_model and (config.model == card["id"] or not parent_of(card))
    return config.served_model if renamed else str(card["id"])


def to_models(
    cards: Sequence[Card],
    dialect: Dialect,
    about: Mapping[str, Any],
    config: SiteConfig,
    known: Mapping[str, Model],
) -> tuple[Model, ...]:
    """Return the models of cards, in their order. Those `known` by name keep the time of their creation."""
    names = {str(card["id"]): served_name(card, config) for card in cards}
    models = []
    for card in cards:
        name, created = names[str(card["id"])], card.get("created")
        context_tokens = config.context_tokens or context_tokens_of(card)
        if context_tokens is None:
            context_tokens = DEFAULT_CONTEXT_TOKENS
            if name not in known:
                log.warning("the server does not say the context of %s: %d", name, context_tokens)
        if name in known:
            created = known[name].created_s
        features = model_features(
            dialect, card, about, config.features, allow_image_urls=config.allow_image_urls
        )
        parent = parent_of(card)
        models.append(
            Model(
                id=name,
                revision=_printable(str(card.get("root") or card["id"])),
                context_tokens=context_tokens,
                created_s=created
                if type(created) is int and 0 <= created <= MAX_UNIX_S
                else int(time.time()),
                features=features,
                parent=_printable(names.get(parent, parent)),
            )
        )
    return tuple(models)


def _printable(text: str) -> str:
    """Return what gateways keep of a name: half a character, for one, can't be sent at all."""
    return "".join(filter(str.isprintable, text[:MAX_NAME_CHARS]))


def max_context_tokens(cards: Iterable[Card], config: SiteConfig) -> int | None:
    """Return the longest context of any model; None where it was only assumed."""
    contexts = [config.context_tokens or context_tokens_of(each) for each in cards]
    return max((each for each in contexts if each is not None), default=None) if all(contexts) else None


def context_tokens_of(card: Card) -> int | None:
    """Return the context of a listed model, as vLLM, SGLang, Mico, providers or llama.cpp name it."""
    meta = card.get("meta") if isinstance(card.get("meta"), dict) else {}
    known = (
        card.get("max_model_len"),
        card.get("context_tokens"),
        card.get("context_length"),
        (meta or {}).get("n_ctx"),
        (meta or {}).get("n_ctx_train"),
    )
    found = (min(MAX_CONTEXT_TOKENS, each) for each in known if type(each) is int and each > 0)
    return next(found, None)


def slot_context_tokens(about: Mapping[str, Any]) -> int:
    """Return the context of llama.cpp's slots, 0 if unknown; its list of models has that of training."""
    settings = about.get("default_generation_settings")
    found = settings.get("n_ctx") if isinstance(settings, dict) else None
    return found if type(found) is int else 0
