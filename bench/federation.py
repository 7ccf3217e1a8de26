"""Send real prompts through a running federation, half streamed and half whole, and check every answer.

    mico up --detach
    python -m bench.federation --data alpaca_like.jsonl.zst --model mico/demo_model/weights

With --kill-site a site dies once a third of the answers have ended, and what ran there goes on elsewhere.
Checks: every body is valid by the `openai` package's own types, every answer ends, every living site takes
part, all counters are zero within two seconds of the end, and (with --model) every greedy text equals that of
the same prompt run alone by plain `transformers` in float32. A prompt longer than the model's context has to
be refused with a 400 for that reason; it is counted (`refused`), and with --model measured. Texts that differ
where the two best tokens are equal but for rounding are listed apart (`numeric_ties`).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import zstandard
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mico.known_models import cached_folder, is_fetchable
from mico.local.folder import Folder

FOLDER = Path(".mico")
TOO_LONG = "context_length_exceeded"
TIE = 1e-4
"""Logits that are no farther apart are equal but for rounding: the order of sums says which is greater."""


@dataclass(frozen=True, slots=True)
class Answered:
    prompt: str
    request_id: str
    text: str
    finish: str
    completion_tokens: int
    site: str
    first_token_s: float
    total_s: float


def prompts(data: Path, count: int, seed: int) -> list[str]:
    """Return distinct real prompts of at most 600 characters."""
    found = {text for text in _texts(data) if 0 < len(text) <= 600}
    return random.Random(seed).sample(sorted(found), count)


def _texts(data: Path) -> Iterator[str]:
    with data.open("rb") as file:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8")
        for line in lines:
            row = json.loads(line)
            yield "\n\n".join(part for part in (row["instruction"], row.get("input") or "") if part)


async def answer_or_none(
    client: AsyncOpenAI, model: str, prompt: str, number: int, most: int
) -> Answered | None:
    """Return the answer, or None if the prompt was refused as too long for the model."""
    try:
        return await ask(client, model, prompt, number, most)
    except BadRequestError as refusal:
        if refusal.code != TOO_LONG:
            raise
        return None


async def ask(client: AsyncOpenAI, model: str, prompt: str, number: int, most: int) -> Answered:
    request: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": most,
        "extra_headers": {"x-request-id": f"bench-{number}"},
    }
    began = time.perf_counter()
    if number % 2:
        return await _streamed(client, request, prompt, began)
    raw = await client.chat.completions.with_raw_response.create(**request)
    body = ChatCompletion.model_validate_json(raw.http_response.content, strict=True)
    total_s = time.perf_counter() - began
    (choice,) = body.choices
    assert body.usage is not None
    return Answered(
        prompt,
        raw.headers["x-request-id"],
        choice.message.content or "",
        choice.finish_reason,
        body.usage.completion_tokens,
        raw.headers["x-mico-site"],
        total_s,
        total_s,
    )


async def _streamed(client: AsyncOpenAI, request: dict[str, Any], prompt: str, began: float) -> Answered:
    text, finishes, first_token_s, usage = "", [], 0.0, None
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    async with client.chat.completions.with_streaming_response.create(
        **request, stream=True, stream_options=options
    ) as raw:
        async for line in raw.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = ChatCompletionChunk.model_validate_json(line[6:], strict=True)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content:
                    first_token_s = first_token_s or time.perf_counter() - began
                    text += choice.delta.content
                finishes += [choice.finish_reason] if choice.finish_reason else []
        headers = raw.headers
    (finish,) = finishes
    assert usage is not None
    return Answered(
        prompt,
        headers["x-request-id"],
        text,
        finish,
        usage.completion_tokens,
        headers["x-mico-site"],
        first_token_s,
        time.perf_counter() - began,
    )


async def run(options: argparse.Namespace, key: str) -> dict[str, Any]:
    chosen = prompts(options.data, options.count, options.seed)
    client = AsyncOpenAI(base_url=options.base_url, api_key=key, max_retries=0, timeout=600)
    model = options.served_model or (await client.models.list()).data[0].id
    gate = asyncio.Semaphore(options.concurrency)
    places = itertools.count(1)
    killed = []

    async def one(number: int, prompt: str) -> Answered | None:
        async with gate:
            answer = await answer_or_none(client, model, prompt, number, options.max_tokens)
        if next(places) == options.count // 3 and options.kill_site:
            killed.append(kill_site(FOLDER))
        return answer

    began = time.perf_counter()
    ended = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(chosen)))
    wall_s = time.perf_counter() - began
    sites = await _idle_sites(options.base_url, key)
    await client.close()
    answers = [answer for answer in ended if answer is not None]
    refused = [prompt for prompt, answer in zip(chosen, ended, strict=True) if answer is None]
    return {"killed": killed, **_report(options, answers, refused, sites, wall_s)}


def kill_site(folder: Path) -> str:
    """Kill the first living site of the federation in a folder, without a word to it; return its name."""
    running = Folder(folder.resolve()).running()
    assert running is not None, f"no federation runs in {folder}"
    site = next(site for site in running.sites if site.alive)
    os.kill(site.pid, signal.SIGKILL)
    return site.name


async def _idle_sites(base_url: str, key: str) -> list[dict[str, Any]]:
    """Return the sites once nothing runs any more. Raises AssertionError if it takes over two seconds."""
    url = base_url.removesuffix("/v1") + "/admin/api/sites"
    deadline = time.perf_counter() + 2.0
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as client:
        while True:
            sites: list[dict[str, Any]] = (await client.get(url)).json()["sites"]
            busy = [
                s["name"] for s in sites if s["running"] or s["pending"] or s["assigned"] or s["token_load"]
            ]
            busy += [s["name"] for s in sites if s["kv_reserved_tokens"]]
            if not busy:
                return sites
            assert time.perf_counter() < deadline, f"still busy: {busy}"
            await asyncio.sleep(0.05)


def _report(
    options: argparse.Namespace,
    answers: list[Answered],
    refused: list[str],
    sites: list[dict[str, Any]],
    wall_s: float,
) -> dict[str, Any]:
    tokens = sum(a.completion_tokens for a in answers)
    by_site = Counter(a.site for a in answers)
    tokens_by_site = Counter[str]()
    for a in answers:
        tokens_by_site[a.site] += a.completion_tokens
    report = {
        "queries": len(answers) + len(refused),
        "refused": len(refused),
        "finish": Counter(a.finish for a in answers),
        "tokens": tokens,
        "wall_s": round(wall_s, 2),
        "tokens_per_s": round(tokens / wall_s, 1),
        "p50_s": round(statistics.median(a.total_s for a in answers), 3),
        "p99_s": round(sorted(a.total_s for a in answers)[int(0.99 * (len(answers) - 1))], 3),
        "p50_first_token_s": round(statistics.median(a.first_token_s for a in answers if a.first_token_s), 3),
        "queries_by_site": dict(by_site),
        "tokens_by_site": dict(tokens_by_site),
        "every_site_took_part": set(by_site) >= {s["name"] for s in sites if s["state"] == "ready"},
    }
    if options.model:
        differ = mismatches(options.model, answers, options.max_tokens, options.reference)
        report["numeric_ties"] = {name: gap for name, gap in differ.items() if gap <= TIE}
        report["greedy_mismatches"] = real_mismatches(differ)
        report["equal_texts"] = len(answers) - len(differ)
        report["wrongly_refused"] = fitting(options.model, refused)
    return report


def real_mismatches(differ: dict[str, float]) -> dict[str, float]:
    """Filter the result of `mismatches`: only texts that differ by more than a numeric tie."""
    return {name: gap for name, gap in differ.items() if gap > TIE}


def fitting(folder: Path, refused: list[str]) -> list[str]:
    """Return the refused prompts that fit the context of the model, with room for a token."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    context = AutoConfig.from_pretrained(folder).max_position_embeddings

    def tokens(prompt: str) -> int:
        chat = [{"role": "user", "content": prompt}]
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    return [prompt for prompt in refused if tokens(prompt) < context]


def mismatches(
    folder: Path, answers: list[Answered], most: int, reference: Path | None = None
) -> dict[str, float]:
    """Return the request ids whose text differs from `generate` run alone on the same prompt in float32, each
    with the distance between its two best logits at the first difference.

    The texts of `generate` are kept in the file `reference`, and taken from it another time.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take minutes
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    context = model.config.max_position_embeddings
    kept = Kept.read(reference, f"{folder}, {most} tokens")
    wrong = {}
    for a in answers:
        if kept.texts.get(a.prompt) == a.text:
            continue
        chat = [{"role": "user", "content": a.prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = ids["input_ids"].shape[1]
        with torch.no_grad():
            out = model.generate(
                **ids,
                do_sample=False,
                max_new_tokens=min(most, context - length),
                output_logits=True,
                return_dict_in_generate=True,
            )
        token_ids = out.sequences[0, length:].tolist()
        kept.add(a.prompt, tokenizer.decode(token_ids, skip_special_tokens=True))
        if kept.texts[a.prompt] != a.text:
            parts = first_difference(
                a.text, [tokenizer.decode(token_ids[:end]) for end in range(1, len(token_ids) + 1)]
            )
            best, second = out.logits[parts][0].topk(2).values.tolist()
            wrong[a.request_id] = best - second
    return wrong


@dataclass(frozen=True, slots=True)
class Kept:
    """Texts by prompt, kept in a file, which belong to one model and one number of tokens."""

    file: Path | None
    of: str
    texts: dict[str, str]

    @classmethod
    def read(cls, file: Path | None, of: str) -> Kept:
        found = json.loads(file.read_text()) if file is not None and file.exists() else {}
        return cls(file, of, found["texts"] if found.get("of") == of else {})

    def add(self, prompt: str, text: str) -> None:
        self.texts[prompt] = text
        if self.file is not None:
            self.file.write_text(json.dumps({"of": self.of, "texts": self.texts}))


def model_folder(model: str) -> Path:
    """Return the folder of a model: itself, or that of one which `mico models fetch` knows."""
    return (cached_folder(model) if is_fetchable(model) else None) or Path(model)


def first_difference(text: str, beginnings: list[str]) -> int:
    """Return the index of the first beginning, each of one token more, that `text` does not have."""
    return next((at for at, each in enumerate(beginnings) if not text.startswith(each)), len(beginnings) - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="alpaca_like.jsonl.zst, or lines of that form"
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--key", help="default: the key that `mico up` wrote to .mico/key")
    parser.add_argument("--served-model", help="default: the first one listed")
    parser.add_argument(
        "--model",
        type=model_folder,
        help="folder of the same weights, or a name as in mico models list, to compare greedy texts",
    )
    parser.add_argument("--reference", type=Path, help="file to keep the texts of transformers in")
    parser.add_argument("--kill-site", action="store_true", help="needs the federation of mico up here")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    key = options.key or (FOLDER / "key").read_text().strip()
    report = asyncio.run(run(options, key))
    print(json.dumps(report))
    wrong = report.get("greedy_mismatches") or report.get("wrongly_refused")
    return 0 if report["every_site_took_part"] and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
