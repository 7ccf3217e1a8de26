"""Learn of Ollama what its OpenAI API does not tell: that it is Ollama, contexts and capabilities."""

from __future__ import annotations

import json
import re
from typing import Any

from site_engine.remote.server import Server, ServerRefused

DEFAULT_CONTEXT_TOKENS = 4096
"""Ollama's own on small GPUs. On larger ones, or by OLLAMA_CONTEXT_LENGTH, it is longer: then `/api/ps` says
so once the model is loaded, or the operator does by `context_tokens`.
"""
_NUM_CTX = re.compile(r"^num_ctx\s+0*([1-9]\d{0,8})\b", re.MULTILINE | re.ASCII)


async def is_ollama(server: Server) -> bool:
    """Return whether a server whose models and metrics tell nothing says that it is Ollama."""
    status, body = await server.get("/")
    return status == 200 and b"Ollama is running" in body[:1000]


async def describe(server: Server, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the list of models, each with its `context_length` and its `capabilities`."""
    status, body = await server.get("/api/ps")
    loaded = loaded_contexts(body) if status == 200 else {}
    return [described(each, await _show(server, each["id"]), loaded.get(each["id"])) for each in listed]


def described(
    listed: dict[str, Any], shown: dict[str, Any], loaded_context_tokens: int | None
) -> dict[str, Any]:
    """Add the context that prompts are cut to: that of the loaded model, else what its parameters say, else
    the default, at most what the model was trained for.
    """
    info = shown.get("model_info")
    facts = info.items() if isinstance(info, dict) else ()
    trained = next((value for name, value in facts if name.endswith(".context_length")), None)
    parameter = _NUM_CTX.search(str(shown.get("parameters") or ""))
    context_tokens = loaded_context_tokens or (int(parameter[1]) if parameter else DEFAULT_CONTEXT_TOKENS)
    if type(trained) is int and trained > 0:
        context_tokens = min(context_tokens, trained)
    return {**listed, "context_length": context_tokens, "capabilities": shown.get("capabilities")}


async def _show(server: Server, model: str) -> dict[str, Any]:
    try:
        return await server.post("/api/show", {"model": model})
    except ServerRefused:
        return {}  # it was deleted meanwhile, or lives elsewhere


def loaded_contexts(body: bytes) -> dict[str, int]:
    """Return the contexts of the models that are in memory, by name."""
    try:
        models = json.loads(body)["models"]
        found = {each["name"]: each.get("context_length") for each in models}
        return {name: tokens for name, tokens in found.items() if type(tokens) is int and tokens > 0}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
