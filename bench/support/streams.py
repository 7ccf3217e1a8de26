"""A closed loop of greedy streams over several gateways, whose clients move on when their gateway breaks."""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import APIConnectionError, APIError, AsyncOpenAI

from bench.federation import Answered, mismatches, prompts, real_mismatches
from mico import demo_model

DEADLINE_S = 300.0
MAX_TRIES = 6


@dataclass(slots=True)
class StreamOutcome:
    """One query as its client saw it: the text of the try that ended, and the longest silence in it."""

    number: int
    tries: int
    answer: Answered
    silence_s: float
    silence_at: float


async def wait_until(holds: Callable[[], Awaitable[bool]], what: str) -> float:
    """Return the seconds until the condition holds. Raises AssertionError after a deadline."""
    began: float = time.perf_counter()
    while not await holds():
        assert time.perf_counter() - began < DEADLINE_S, f"not within {DEADLINE_S:.0f} s: {what}"
        await asyncio.sleep(0.02)
    return round(time.perf_counter() - began, 2)


class Watcher:
    """The federation as its living gateways report it; `alive` gives their addresses."""

    def __init__(self, alive: Callable[[], list[str]], key: str) -> None:
        self.alive = alive
        self.http = httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=5.0)

    async def sites(self, root_url: str) -> list[dict[str, Any]]:
        try:
            listed = await self.http.get(f"{root_url}/admin/api/sites")
        except httpx.HTTPError:
            return []
        return list(listed.json()["sites"]) if listed.status_code == 200 else []

    async def everywhere(self, name: str, state: bool) -> bool:
        """Return whether each living gateway reports that site as ready (or as not ready)."""
        for url in self.alive():
            ready = any(s["name"] == name and s["state"] == "ready" for s in await self.sites(url))
            if ready is not state:
                return False
        return True

    async def all_ready(self, names: Sequence[str]) -> bool:
        return all([await self.everywhere(name, True) for name in names])

    async def idle(self) -> bool:
        figures = ("running", "pending", "assigned", "token_load", "kv_reserved_tokens")
        listed = [await self.sites(url) for url in self.alive()]
        return all(listed) and not any(site[name] for sites in listed for site in sites for name in figures)


class Load:
    """A closed loop of streams; every client moves to the other gateway when its own breaks."""

    def __init__(self, root_urls: Sequence[str], key: str, options: argparse.Namespace) -> None:
        """`options`: data, count, distinct, seed, concurrency, max_tokens."""
        self.options = options
        self.texts = prompts(options.data, options.distinct, options.seed)
        self.tag = f"streams-{time.time_ns()}"
        self.next = 0
        self.ended: list[StreamOutcome] = []
        self.failed: list[str] = []
        self.broken: Counter[str] = Counter()
        self.clients = [
            AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) for url in root_urls
        ]

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.options.concurrency)))
        for client in self.clients:
            await client.close()

    @property
    def progress(self) -> float:
        return len(self.ended) / float(self.options.count)

    async def reached(self, share: float) -> None:
        async def far_enough() -> bool:
            return self.progress >= share or self.next >= self.options.count

        await wait_until(far_enough, f"{share:.0%} of the queries answered")

    async def _client(self) -> None:
        while self.next < self.options.count:
            number = self.next
            self.next += 1
            await self._query(number)

    async def _query(self, number: int) -> None:
        for attempt in range(MAX_TRIES):
            client = self.clients[(number + attempt) % len(self.clients)]
            try:
                self.ended.append(await self._stream(client, number, attempt))
                return
            except (APIError, httpx.HTTPError) as error:
                self.broken[f"{type(error).__name__}: {error}"[:120]] += 1
                if isinstance(error, APIConnectionError):
                    await asyncio.sleep(0.2)
        self.failed.append(f"{self.tag}-{number}")

    async def _stream(self, client: AsyncOpenAI, number: int, attempt: int) -> StreamOutcome:
        prompt, began = self.texts[number % len(self.texts)], time.perf_counter()
        request_id = f"{self.tag}-{number}-{attempt}"
        stream = await client.chat.completions.create(
            model=demo_model.NAME,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=self.options.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"x-request-id": request_id},
        )
        text, finish, tokens, first_s = "", "", 0, 0.0
        last, silence_s, silence_at = time.perf_counter(), 0.0, began
        async for chunk in stream:
            now = time.perf_counter()
            if first_s and now - last > silence_s:
                silence_s, silence_at = now - last, last
            last = now
            first_s = first_s or now - began
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        if not finish:
            raise httpx.RemoteProtocolError("the stream ended without a finish")
        answer = Answered(prompt, request_id, text, finish, tokens, "", first_s, time.perf_counter() - began)
        return StreamOutcome(number, attempt + 1, answer, silence_s, silence_at)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, help="alpaca_like.jsonl.zst, or lines of its form"
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--distinct", type=int, default=100, help="different prompts among them")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)


def recorded(database: Path, tag: str) -> Counter[str]:
    """Return the number of usage rows of each request id of this run."""
    with sqlite3.connect(database) as connection:
        found = connection.execute("select request_id from usage where request_id like ?", (f"{tag}-%",))
        return Counter(request_id for (request_id,) in found)


async def verdict(database: Path, load: Load) -> dict[str, Any]:
    """Check the queries of this load: the answers that are missing and the usage rows that are missing or
    double.
    """
    answered = {each.answer.request_id for each in load.ended}

    async def written() -> bool:
        return answered <= recorded(database, load.tag).keys()

    await wait_until(written, "every answer recorded")
    rows = recorded(database, load.tag)
    return {
        "queries": load.options.count,
        "answered": len(load.ended),
        "failed": load.failed,
        "asked_again_at_the_other_gateway": sum(each.tries > 1 for each in load.ended),
        "broken": load.broken,
        "longest_silence_s": round(max(each.silence_s for each in load.ended), 2),
        "tokens": sum(each.answer.completion_tokens for each in load.ended),
        "rows_twice": [request_id for request_id, count in rows.items() if count > 1],
        "answers_without_a_row": sorted(answered - rows.keys()),
    }


def wrong_texts(folder: Path, ended: list[StreamOutcome], most: int) -> list[str]:
    """Return request ids whose text differs from `generate` alone, ties apart; a prompt is generated once."""
    by_prompt: dict[str, Answered] = {}
    wrong = []
    for each in ended:
        first = by_prompt.setdefault(each.answer.prompt, each.answer)
        if (each.answer.text, each.answer.completion_tokens) != (first.text, first.completion_tokens):
            wrong.append(each.answer.request_id)
    return [*wrong, *real_mismatches(mismatches(folder, list(by_prompt.values()), most))]
