"""Measure a job of fine-tuning through a gateway and a site: from upload to the tuned model's first token.

`python -m bench.tuning_site --rows 800 --beside 8` starts both on this machine, the site on a GPU if there is
one, with the demo model, trains it by OpenAI's API while streams of the base go on, and asks the model that
comes of it. The last line is all figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.support.http_servers import MODEL, Server, served
from bench.tuning import in_format, rows

DEMO = Path(__file__).parents[1] / "mico/demo_model/weights"
POLL_S = 0.01
TEXTS = 32


class Client:
    """Asks a gateway as a tenant does."""

    def __init__(self, server: Server) -> None:
        headers = {"authorization": f"Bearer {server.target.key}"}
        base_url = f"http://127.0.0.1:{server.target.port}/v1"
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=120.0)

    def asked(self, method: str, path: str, **how: Any) -> Any:
        answer = self._http.request(method, path, **how)
        answer.raise_for_status()
        return answer.json()

    def upload(self, content: bytes) -> str:
        files = {"file": ("rows.jsonl", content)}
        return str(self.asked("POST", "/files", files=files, data={"purpose": "fine-tune"})["id"])

    def streamed(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the text of each piece of a chat's answer."""
        with self._http.stream("POST", "/chat/completions", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if choice["delta"].get("content"):
                            yield choice["delta"]["content"]


def chat(model: str, asked: str, tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0.0, **more}


class Beside:
    """Streams of the base that go on until told to end, and the times between their pieces."""

    def __init__(self, server: Server, count: int) -> None:
        self._ended = threading.Event()
        self.between_s: list[tuple[float, float]] = []  # when, and how long after the one before
        self._threads = [
            threading.Thread(target=self._run, args=(Client(server), number)) for number in range(count)
        ]

    @contextmanager
    def going_on(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()

    def _run(self, client: Client, number: int) -> None:
        while not self._ended.is_set():
            last_s = 0.0
            for _ in client.streamed(chat(MODEL, f"Tell me {number} things.", 200, ignore_eos=True)):
                now_s = time.perf_counter()
                if last_s:
                    self.between_s.append((now_s, now_s - last_s))
                last_s = now_s
                if self._ended.is_set():
                    return

    def ms(self, since_s: float, until_s: float) -> list[float]:
        """Return the median, the 99th percentile and the longest time between pieces."""
        found = [each for at_s, each in self.between_s if since_s <= at_s < until_s]
        if len(found) < 2:
            return []
        marks = statistics.quantiles(found, n=100)
        return [round(1000 * each, 1) for each in (marks[49], marks[98], max(found))]


def answers(client: Client, model: str) -> list[str]:
    prompts = [json.loads(line)["messages"][0]["content"] for line in rows(TEXTS, 2).splitlines()]
    return ["".join(client.streamed(chat(model, prompt, 24))) for prompt in prompts]


def measure(server: Server, count: int, epochs: int, beside: int) -> dict[str, object]:
    client = Client(server)
    before = in_format(answers(client, MODEL))
    streams = Beside(server, beside)
    with streams.going_on():
        alone_s = time.perf_counter()
        time.sleep(4.0 if beside else 0.0)
        uploaded_s = time.perf_counter()
        job = client.asked(
            "POST",
            "/fine_tuning/jobs",
            json={
                "model": MODEL,
                "training_file": client.upload(rows(count, 0)),
                "seed": 7,
                "method": {
                    "type": "supervised",
                    "supervised": {"hyperparameters": {"n_epochs": epochs, "learning_rate_multiplier": 5.0}},
                },
            },
        )
        trains_s = 0.0
        while job["status"] not in ("succeeded", "failed", "cancelled"):
            time.sleep(POLL_S)
            job = client.asked("GET", f"/fine_tuning/jobs/{job['id']}")
            if not trains_s and (job.get("mico") or {}).get("step"):
                trains_s = time.perf_counter()
        succeeded_s = time.perf_counter()
        if job["status"] != "succeeded":
            raise RuntimeError(f"the job {job['status']}: {job['error']}")
        next(iter(client.streamed(chat(job["fine_tuned_model"], "I need 7 red cups, please.", 24))))
        first_s = time.perf_counter()
    after = in_format(answers(client, job["fine_tuned_model"]))
    return {
        "site_ready_s": server.ready_s,
        "uploaded_to_first_step_s": round(trains_s - uploaded_s, 2),
        "uploaded_to_succeeded_s": round(succeeded_s - uploaded_s, 2),
        "succeeded_to_first_token_s": round(first_s - succeeded_s, 3),
        "trained_tokens": job["trained_tokens"],
        "trained_tokens_per_s": round(job["trained_tokens"] / (succeeded_s - (trains_s or uploaded_s))),
        "streams_beside": beside,
        "between_ms_p50_p99_most_before": streams.ms(alone_s, uploaded_s),
        "between_ms_p50_p99_most_until_first_step": streams.ms(uploaded_s, trains_s or succeeded_s),
        "between_ms_p50_p99_most_while_training": streams.ms(trains_s or uploaded_s, succeeded_s),
        "texts_in_the_trained_format": f"{before} before, {after} after, of {TEXTS}",
        "kept": after == TEXTS and first_s - succeeded_s <= 1.0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tuning_site", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="folder of the base")
    parser.add_argument("--rows", type=int, default=800, help="that it is trained on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--beside", type=int, default=0, help="streams of the base meanwhile")
    parser.add_argument("--between-tokens", type=float, default=0.02, help="the site's bound, in seconds")
    parser.add_argument("--slots", type=int, default=16, help="of the site")
    options = parser.parse_args(arguments)
    more = f"training = true\ntraining_between_tokens_s = {options.between_tokens}"
    with (
        tempfile.TemporaryDirectory() as work,
        served("mico", options.model, Path(work), slots=options.slots, extra={"mico": more}) as server,
    ):
        figures = measure(server, options.rows, options.epochs, options.beside)
    for name, value in figures.items():
        print(f"{name.replace('_', ' ')}: {value}", flush=True)
    print(json.dumps(figures))
    return 0 if figures["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
