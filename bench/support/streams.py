"""A closed loop of greedy streams over several gateways, whose clients move on when their gateway breaks."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI
from sqlalchemy import create_engine, make_url, select

from bench.federation import Answered, mismatches, prompts, real_mismatches
from gateway.store.tables import usage
from mico import demo_model

DEADLINE_S = 300.0
RECORDED_WITHIN_S = 30.0
MAX_TRIES = 6
MAX_REFUSALS = 120
REFUSED_PAUSE_S = 0.5
REFUSED = (429, 503)
"""Refusals before a query is accepted: the client asks again after a pause."""


@dataclass(slots=True)
class StreamOutcome:
    """One query as its client saw it: the text of the try that ended, and the longest silence in it.

    `began`, of the first try, and `silence_at` are of `time.perf_counter`; times count from `began`.
    """

    number: int
    tries: int
    answer: Answered
    prompt_tokens: int
    began: float
    silence_s: float
    silence_at: float


async def wait_until(holds: Callable[[], Awaitable[bool]], what: str, within_s: float = DEADLINE_S) -> float:
    """Return the seconds until the condition holds. Raises AssertionError after a deadline."""
    began: float = time.perf_counter()
    while not await holds():
        assert time.perf_counter() - began < within_s, f"not within {within_s:.0f} s: {what}"
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

    async def limit_tenant(self, limits: dict[str, int]) -> None:
        """Set quotas for the key's tenant."""
        url = f"{self.alive()[0]}/admin/api"
        keys = (await self.http.get(f"{url}/keys")).raise_for_status().json()["keys"]
        wanted = {"scope": "tenant", "subject": keys[0]["tenant"], "limits": limits, "reason": "bench"}
        (await self.http.post(f"{url}/quotas", json=wanted)).raise_for_status()

    async def idle(self) -> bool:
        figures = ("running", "pending", "assigned", "token_load", "kv_reserved_tokens")
        listed = [await self.sites(url) for url in self.alive()]
        return all(listed) and not any(site[name] for sites in listed for site in sites for name in figures)


class Load:
    """A closed loop of streams; every client moves to the other gateway when its own breaks."""

    def __init__(
        self, root_urls: Sequence[str], key: str, options: argparse.Namespace, texts: Sequence[str]
    ) -> None:
        """`options`: count, concurrency, max_tokens. While `open`, queries go on beyond `count`."""
        self.options = options
        self.texts = texts
        self.tag = f"streams-{time.time_ns()}"
        self.next = 0
        self.open = False
        self.ended: list[StreamOutcome] = []
        self.failed: list[str] = []
        self.broken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.clients = [
            AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) for url in root_urls
        ]

    @classmethod
    def from_options(cls, root_urls: Sequence[str], key: str, options: argparse.Namespace) -> Self:
        """Make the load that the command line describes (`add_options`)."""
        return cls(root_urls, key, options, prompts(options.data, options.distinct, options.seed))

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self.options.concurrency)))

    async def close(self) -> None:
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
        while self.open or self.next < self.options.count:
            number = self.next
            self.next += 1
            await self._query(number)

    async def _query(self, number: int) -> None:
        tries = refusals = 0
        began = time.perf_counter()
        while tries < MAX_TRIES and refusals < MAX_REFUSALS:
            client = self.clients[(number + tries + refusals) % len(self.clients)]
            try:
                self.ended.append(await self._stream(client, number, tries + refusals, began))
                return
            except (APIError, httpx.HTTPError) as error:
                if isinstance(error, APIStatusError) and error.status_code in REFUSED:
                    refusals += 1
                    self.refused[_described(error)] += 1
                    await asyncio.sleep(REFUSED_PAUSE_S)
                    continue
                tries += 1
                self.broken[_described(error)] += 1
                if isinstance(error, APIConnectionError):
                    await asyncio.sleep(0.2)
        self.failed.append(f"{self.tag}-{number}")

    async def _stream(self, client: AsyncOpenAI, number: int, attempt: int, began: float) -> StreamOutcome:
        prompt = self.texts[number % len(self.texts)]
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
        text, finish, tokens, prompt_tokens, first_s = "", "", 0, 0, 0.0
        last, silence_s, silence_at = time.perf_counter(), 0.0, began
        async for chunk in stream:
            now = time.perf_counter()
            if first_s and now - last > silence_s:
                silence_s, silence_at = now - last, last
            last = now
            first_s = first_s or now - began
            if chunk.usage:
                tokens, prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        if not finish:
            raise httpx.RemoteProtocolError("the stream ended without a finish")
        answer = Answered(prompt, request_id, text, finish, tokens, "", first_s, time.perf_counter() - began)
        return StreamOutcome(number, attempt + 1, answer, prompt_tokens, began, silence_s, silence_at)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:120]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, required=True, help="alpaca_like.jsonl.zst, or lines of its form"
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--distinct", type=int, default=100, help="different prompts among them")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)


def recorded(database_url: str, tag: str) -> dict[str, list[tuple[int, int]]]:
    """Return prompt and completion tokens of every usage row of this run, by request id."""
    backend = make_url(database_url).get_backend_name()
    engine = create_engine(
        make_url(database_url).set(drivername="sqlite" if backend == "sqlite" else "postgresql+psycopg")
    )
    columns = usage.c.request_id, usage.c.prompt_tokens, usage.c.completion_tokens
    found: dict[str, list[tuple[int, int]]] = {}
    with engine.connect() as connection:
        for request_id, prompt, completion in connection.execute(
            select(*columns).where(usage.c.request_id.startswith(f"{tag}-", autoescape=True))
        ):
            found.setdefault(request_id, []).append((prompt, completion))
    engine.dispose()
    return found


async def verdict(database_url: str, load: Load, within_s: float = RECORDED_WITHIN_S) -> dict[str, Any]:
    """Check the queries of this load: the answers that are missing, and the usage rows that are missing,
    double or of other tokens than the answer.
    """
    answers = {each.answer.request_id: each for each in load.ended}

    async def written() -> bool:
        return answers.keys() <= recorded(database_url, load.tag).keys()

    recorded_s = within_s
    with suppress(AssertionError):  # then `answers_without_a_row` names them
        recorded_s = await wait_until(written, "every answer recorded", within_s)
    rows = recorded(database_url, load.tag)
    told = {name: (each.prompt_tokens, each.answer.completion_tokens) for name, each in answers.items()}
    return {
        "queries": load.next,
        "answered": len(load.ended),
        "failed": load.failed,
        "asked_again_at_the_other_gateway": sum(each.tries > 1 for each in load.ended),
        "broken": load.broken,
        "refused": load.refused,
        "longest_silence_s": round(max(each.silence_s for each in load.ended), 2),
        "tokens": sum(each.answer.completion_tokens for each in load.ended),
        "recorded_after_s": recorded_s,
        "rows_twice": sorted(name for name, found in rows.items() if len(found) > 1),
        "answers_without_a_row": sorted(answers.keys() - rows.keys()),
        "rows_with_other_tokens": sorted(
            name for name in answers.keys() & rows if told[name] != rows[name][0]
        ),
    }


def wrong_texts(folder: Path, answers: Sequence[Answered], most: int) -> list[str]:
    """Return request ids whose text differs from `generate` alone, ties apart; a prompt is generated once."""
    by_prompt: dict[str, Answered] = {}
    wrong = []
    for each in answers:
        first = by_prompt.setdefault(each.prompt, each)
        if (each.text, each.completion_tokens) != (first.text, first.completion_tokens):
            wrong.append(each.request_id)
    return [*wrong, *real_mismatches(mismatches(folder, list(by_prompt.values()), most))]
