"""Uploads training files and creates jobs by OpenAI's SDK, and waits for what becomes of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai.types.fine_tuning import FineTuningJob

from tests.support.batch_replica import POLL_S, Replica

JOBS = "/v1/fine_tuning/jobs"


def rows(count: int = 32) -> bytes:
    def row(number: int) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": f"answer {number}"},
            ]
        }

    return b"".join(json.dumps(row(number)).encode() + b"\n" for number in range(count))


async def upload(here: Replica, content: bytes, key: str = "one") -> str:
    return (await here.sdk(key).files.create(file=("rows.jsonl", content), purpose="fine-tune")).id


async def create(
    here: Replica, content: bytes | None = None, key: str = "one", **asked: Any
) -> FineTuningJob:
    file_id = await upload(here, rows() if content is None else content, key)
    return await here.sdk(key).fine_tuning.jobs.create(model="m", training_file=file_id, **asked)


async def reached(here: Replica, job_id: str, *statuses: str, key: str = "one") -> FineTuningJob:
    async with asyncio.timeout(60):
        while True:
            job = await here.sdk(key).fine_tuning.jobs.retrieve(job_id)
            if job.status in statuses:
                return job
            await asyncio.sleep(POLL_S)


async def recorded(here: Replica, job_id: str, step: int) -> None:
    """Wait until the ledger has a step."""
    async with asyncio.timeout(60):
        while True:
            if (await here.raw("GET", f"{JOBS}/{job_id}")).json()["mico"]["step"] >= step:
                return
            await asyncio.sleep(POLL_S)
