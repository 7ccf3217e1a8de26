"""What a model behind a server is for, by what servers say of themselves and by what their operator says."""

from __future__ import annotations

from typing import Any

import pytest

from site_engine.config import ConfigError, SiteConfig
from site_engine.remote.abilities import model_features, read_abilities
from site_engine.remote.dialects import LLAMA_CPP, SGLANG, UNKNOWN, VLLM


@pytest.mark.parametrize(
    ("listed", "about", "told"),
    [
        ({}, {}, set()),
        ({}, {"modalities": {"vision": True, "audio": False}}, {"chat", "vision"}),
        ({}, {"modalities": {"vision": False}}, set()),
        ({}, {"modalities": None}, set()),
        ({}, {"is_generation": True, "has_image_understanding": True}, {"chat", "vision"}),
        ({}, {"is_generation": True, "has_image_understanding": False}, set()),
        ({}, {"is_generation": False}, {"embed"}),
        ({}, {"model_type": {"embedding": {"pooling": "mean"}}}, {"embed"}),
        ({}, {"model_type": {"reranker": {"id2label": {}}}}, {"rerank"}),
        ({"architecture": {"input_modalities": ["text", "image"]}}, {}, {"chat", "vision"}),
        ({"architecture": {"input_modalities": ["text"]}}, {}, set()),
        ({"architecture": {"input_modalities": None}}, {}, set()),
        ({"features": ["chat", "logprobs", "vision"]}, {}, {"chat", "vision"}),
        ({"features": ["embed"]}, {}, {"embed"}),
        ({"features": ["chat", 7]}, {}, {"chat"}),
    ],
)
def test_what_servers_say_of_their_models(
    listed: dict[str, Any], about: dict[str, Any], told: set[str]
) -> None:
    assert read_abilities(listed, about) == told


def test_a_model_of_which_nothing_is_known_chats() -> None:
    assert model_features(VLLM, {}, {}, (), allow_image_urls=True) == VLLM.features


def test_the_operator_has_the_last_word() -> None:
    sees = {"modalities": {"vision": True}}
    assert model_features(LLAMA_CPP, {}, sees, ("chat",), allow_image_urls=False) == LLAMA_CPP.features
    assert model_features(VLLM, {}, {}, ("vision",), allow_image_urls=False) == (*VLLM.features, "vision")


def test_a_model_that_only_embeds_does_not_chat() -> None:
    assert model_features(VLLM, {}, {}, ("embed",), allow_image_urls=True) == ("embed",)
    assert model_features(SGLANG, {}, {"is_generation": False}, (), allow_image_urls=False) == ("embed",)
    both = model_features(UNKNOWN, {}, {}, ("chat", "embed", "rerank"), allow_image_urls=False)
    assert both == (*UNKNOWN.features, "embed", "rerank")


def test_addresses_are_fetched_only_where_the_operator_allows_it() -> None:
    assert "image_urls" not in model_features(VLLM, {}, {}, ("vision",), allow_image_urls=False)
    assert "image_urls" in model_features(VLLM, {}, {}, ("vision",), allow_image_urls=True)


def test_settings_that_make_no_sense_are_named() -> None:
    front: dict[str, Any] = {"site": "s", "gateways": ("h:1",), "engine": "openai", "url": "http://h"}
    with pytest.raises(ConfigError, match="features has 'sight'"):
        SiteConfig(**front, features=("sight",))
    own: dict[str, Any] = {"site": "s", "gateways": ("h:1",), "model": "m"}
    with pytest.raises(ConfigError, match="features is set, but engine is native"):
        SiteConfig(**own, features=("vision",))
    with pytest.raises(ConfigError, match="allow_image_urls is set, but engine is native"):
        SiteConfig(**own, allow_image_urls=True)
