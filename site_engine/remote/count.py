"""Count the tokens of a prompt with the tokenizer of a server; its dialect says how the server is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign
from site_engine.remote.dialects import Counting, Dialect
from site_engine.remote.request import build_request
from site_engine.remote.server import Server, ServerLost, ServerRefused
from site_engine.remote.stream import possible_count

MAX_COUNTS = 8
"""Prompts that a server counts at a time."""
_READ_BY_TEMPLATES = ("messages", "tools", "chat_template_kwargs")


class TokenCounter:
    """Has a server count prompts, a few at a time. Lives on the event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._counting: set[asyncio.Task[None]] = set()

    def count(
        self, assign: Assign, model: str, dialect: Dialect, reply: Callable[[int | NotServed], None]
    ) -> None:
        """Reply with the tokens of a prompt, or why they were not counted; `model` as the server calls it."""
        if len(self._counting) >= MAX_COUNTS:
            reply(NotServed(Reason.FULL, f"{MAX_COUNTS} prompts are being counted here already"))
            return

        async def ask() -> None:
            try:
                answer: int | NotServed = await count_tokens(self._server, dialect, model, assign)
            except NotServed as refusal:
                answer = refusal
            except ServerRefused as exc:
                answer = exc.refusal
            except ServerLost as exc:
                answer = NotServed(Reason.INTERNAL, str(exc))
            reply(answer)

        task = asyncio.get_running_loop().create_task(ask())
        self._counting.add(task)
        task.add_done_callback(self._counting.discard)

    def cancel(self) -> None:
        """Count no prompt to its end: nobody waits for it."""
        for task in self._counting:
            task.cancel()


async def count_tokens(server: Server, dialect: Dialect, model: str, assign: Assign) -> int:
    """Return the tokens of a prompt; `model` as the server calls it.

    Raises NotServed, ServerRefused and ServerLost.
    """
    asked = build_request(assign, model, dialect).body
    prompt: dict[str, Any] = {name: asked[name] for name in _READ_BY_TEMPLATES if name in asked}
    prompt = prompt or {"prompt": asked["prompt"]}
    if isinstance(prompt.get("prompt"), list):
        return len(prompt["prompt"])  # of token ids
    if dialect.counting is Counting.TOKENIZE:
        found = await server.post("/tokenize", {"model": model, **prompt})
        tokens = found.get("count")
    elif dialect.counting is Counting.TEMPLATE_FIRST:
        if "messages" in prompt:
            prompt = await server.post("/apply-template", prompt)
        body = {"content": prompt.get("prompt"), "add_special": True, "parse_special": True}
        ids = (await server.post("/tokenize", body)).get("tokens")
        tokens = len(ids) if isinstance(ids, list) else None
    else:
        message = f"this server ({dialect.name}) counts no tokens of a prompt"
        raise NotServed(Reason.UNSUPPORTED, message)
    if not isinstance(tokens, int) or possible_count(tokens) is None:
        raise NotServed(Reason.INTERNAL, "the server's answer has no count of tokens")
    return tokens
