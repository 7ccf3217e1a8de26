"""A batch beside the streams: submitted to whichever gateway answers, read back when it is complete."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from openai import APIError, AsyncOpenAI

from bench.federation import Answered
from mico import demo_model

T = TypeVar("T")
ENDPOINT: Final = "/v1/chat/completions"
POLL_S = 0.5
TRIES = 600
"""Polls and repetitions: an operation is tried again at the next gateway until one answers."""


class Batch:
    """`texts` as the lines of one batch, greedy, each answered once however often gateways change."""

    def __init__(self, clients: Sequence[AsyncOpenAI], texts: Sequence[str], max_tokens: int) -> None:
        self._clients = clients
        self._texts = texts
        self._max_tokens = max_tokens
        self._id = ""

    async def submit(self) -> None:
        lines = "".join(json.dumps(self._line(number)) + "\n" for number in range(len(self._texts)))
        file = await self._at_any(
            lambda client: client.files.create(file=("lines.jsonl", lines.encode()), purpose="batch")
        )
        batch = await self._at_any(
            lambda client: client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
            )
        )
        self._id = batch.id

    async def answers(self) -> tuple[dict[str, Any], list[Answered]]:
        """Wait for the end; return the figures of the batch and its answers."""
        for _ in range(TRIES):
            batch = await self._at_any(lambda client: client.batches.retrieve(self._id))
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                break
            await asyncio.sleep(POLL_S)
        lines: list[dict[str, Any]] = []
        if file_id := batch.output_file_id:
            content = await self._at_any(lambda client: client.files.content(file_id))
            lines = [json.loads(line) for line in content.text.splitlines()]
        times = Counter(line["custom_id"] for line in lines)
        expected = {str(number) for number in range(len(self._texts))}
        figures = {
            "batch_status": batch.status,
            "batch_lines": len(self._texts),
            "batch_lines_wrong": sorted(name for name in expected | times.keys() if times[name] != 1),
        }
        return figures, [self._answered(line) for line in lines]

    def _line(self, number: int) -> dict[str, Any]:
        body = {
            "model": demo_model.NAME,
            "messages": [{"role": "user", "content": self._texts[number]}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        return {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}

    def _answered(self, line: dict[str, Any]) -> Answered:
        body = line["response"]["body"]
        (choice,) = body["choices"]
        return Answered(
            prompt=self._texts[int(line["custom_id"])],
            request_id=f"{self._id}-{line['custom_id']}",
            text=choice["message"]["content"],
            finish=choice["finish_reason"],
            completion_tokens=body["usage"]["completion_tokens"],
            site="",
            first_token_s=0.0,
            total_s=0.0,
        )

    async def _at_any(self, call: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        """Return the result of the first gateway that gives one. Raises the last error of the tries."""
        for attempt in range(TRIES):
            try:
                return await call(self._clients[attempt % len(self._clients)])
            except APIError:
                await asyncio.sleep(POLL_S)
        return await call(self._clients[0])
