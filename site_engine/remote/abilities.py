"""Learn what the models of a server are for: chats, images, embeddings, ranking. Pure.

Many servers do not say it: the operator does then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from site_engine.config import FEATURES
from site_engine.remote.dialects import Dialect

CHAT, VISION, EMBED, RERANK = "chat", "vision", "embed", "rerank"
IMAGE_URLS: Final = "image_urls"


def model_features(
    dialect: Dialect,
    listed: Mapping[str, Any],
    about: Mapping[str, Any],
    configured: tuple[str, ...],
    *,
    allow_image_urls: bool,
) -> tuple[str, ...]:
    """Return the features of a model, for Hello.

    `listed` is its entry in the server's list of models, `about` the server's page about itself, `configured`
    what the operator says, which wins. A model of which nothing is known chats.
    """
    abilities = frozenset(configured) or read_abilities(listed, about) or {CHAT}
    capabilities = listed.get("capabilities")
    lacks = {"tools"} if isinstance(capabilities, list) and "tools" not in capabilities else set()
    features = [each for each in dialect.features if each not in lacks] if abilities & {CHAT, VISION} else []
    features += [each for each in FEATURES if each in abilities and each != CHAT]
    return (*features, IMAGE_URLS) if allow_image_urls and VISION in abilities else tuple(features)


def read_abilities(listed: Mapping[str, Any], about: Mapping[str, Any]) -> frozenset[str]:
    """Return what the server says of a model, empty if it says nothing."""
    if about.get("is_generation") is False:  # SGLang
        return frozenset({EMBED})
    kinds = about.get("model_type")  # text-embeddings-inference
    if isinstance(kinds, dict):
        return frozenset(ability for kind, ability in _TEI_KINDS.items() if kind in kinds)
    capabilities = listed.get("capabilities")  # Ollama
    if isinstance(capabilities, list):
        return frozenset(ability for name, ability in _CAPABILITIES.items() if name in capabilities)
    features = listed.get("features")  # another gateway of this project
    if isinstance(features, list):
        return frozenset(FEATURES).intersection(each for each in features if isinstance(each, str))
    inputs = _within(listed, "architecture").get("input_modalities")  # OpenRouter
    sees = (
        _within(about, "modalities").get("vision") is True  # llama.cpp
        or about.get("has_image_understanding") is True  # SGLang
        or (isinstance(inputs, list) and "image" in inputs)
    )
    return frozenset({CHAT, VISION}) if sees else frozenset()


_CAPABILITIES: Final = {"completion": CHAT, "vision": VISION, "embedding": EMBED}
_TEI_KINDS: Final = {"embedding": EMBED, "reranker": RERANK}


def _within(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    nested = found.get(name)
    return nested if isinstance(nested, dict) else {}
