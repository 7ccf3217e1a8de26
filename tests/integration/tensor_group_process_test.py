"""A tensor group is one engine to its site: it answers as one, and a rank that is lost takes all with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from site_engine.config import SiteConfig
from site_engine.engine.process_client import EngineProcess, Orphans
from site_engine.native import engine_settings
from tests.support.child_processes import children_of, is_there
from tests.support.engine_models import FAMILIES, family, greedy_answer
from tests.support.heard_engine import WITHIN_S, HeardEngine, run
from tests.support.tensor_groups import saved

PROMPT = "abc"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_group_answers_as_one_engine_until_a_follower_is_killed(tmp_path: Path) -> None:
    plain = saved(tmp_path, FAMILIES["llama"]())
    config = SiteConfig(
        site="alpha",
        gateways=("127.0.0.1:1",),
        model=str(tmp_path),
        device="cpu+cpu",
        threads=1,
        slots=4,
        kv_tokens=256,
        iteration_floor_s=0.05,
    )
    wanted = greedy_answer(plain, list(map(ord, PROMPT)), 150)

    async def scenario() -> None:
        process = await EngineProcess.launch(engine_settings(config), time.monotonic)
        heard = HeardEngine(process)
        orphans: list[Orphans] = []
        process.on_lost = orphans.append
        assert (await process.ready()).kv_tokens == 256
        process.vocabulary = family("llama").served.vocabulary
        process.start(heard.listener())
        (follower,) = children_of(process.pid)
        assert await heard.submit("short", PROMPT, max_tokens=20, temperature=0.0) is None
        assert await heard.submit("long", PROMPT, max_tokens=150, temperature=0.0) is None
        await heard.until(lambda: heard.finishes("short"))
        assert tokens(heard, "short") == wanted[:20]
        os.kill(follower, signal.SIGKILL)
        await heard.until(lambda: heard.broken)
        (left,) = orphans
        (answer,) = left.answers  # for another engine to go on with, at the token that it had reached
        assert answer.request.id == "long" and not heard.finishes("long")
        assert answer.token_ids == wanted[: len(answer.token_ids)] and answer.token_ids
        async with asyncio.timeout(WITHIN_S):
            while is_there(process.pid, as_zombie=True) or is_there(follower, as_zombie=False):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # nothing reports the end of another's child

    run(scenario())


def tokens(heard: HeardEngine, name: str) -> list[int]:
    return [token for each in heard.outputs if each.request_id == name for token in each.token_ids]
