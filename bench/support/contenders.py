"""How each gateway of a comparison is started in front of the scripted upstream."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from mico.local.plan import free_port
from predictor.artifact import LEXICAL_NAME, SHIPPED
from tests.support.gateway_process import Contender, Place, answering, mico, process
from tests.support.scripted_upstream import MODEL

KEY = "sk-measured"
LITELLM = """
model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
general_settings: {{master_key: {key}}}
litellm_settings: {{telemetry: false}}
"""


@asynccontextmanager
async def litellm(place: Place) -> AsyncIterator[Contender]:
    """One worker, a master key and no database: its lightest form with authentication."""
    config, port = place.folder / "litellm.yaml", free_port()
    config.write_text(LITELLM.format(model=MODEL, port=place.upstream_port, key=KEY))
    command = (place.tools / "litellm", "--config", config, "--port", port, "--num_workers", 1)
    async with process("litellm", place, *command, "--host", "127.0.0.1") as started:
        await answering(f"http://127.0.0.1:{port}/health/liveliness", started, place.folder)
        yield Contender("litellm", port, KEY, started, place.folder / "litellm.log")


@asynccontextmanager
async def smg(place: Place) -> AsyncIterator[Contender]:
    port, metrics = free_port(), free_port()
    worker = ("--worker-urls", f"http://127.0.0.1:{place.upstream_port}", "--policy", "round_robin")
    own = ("--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics, "--api-key", KEY)
    async with process("smg", place, place.tools / "smg", "launch", *worker, *own) as started:
        await answering(f"http://127.0.0.1:{port}/readiness", started, place.folder)
        yield Contender("smg", port, KEY, started, place.folder / "smg.log")


@asynccontextmanager
async def bare(place: Place) -> AsyncIterator[Contender]:
    port = free_port()
    ports = ("--http-port", port, "--grpc-port", place.link_port)
    async with process("bare", place, sys.executable, "-m", "bench.studies.bare", *ports) as started:
        await answering(f"http://127.0.0.1:{port}/ready", started, place.folder)
        yield Contender("bare", port, "none", started, place.folder / "bare.log")


CONTENDERS: dict[str, Callable[[Place], AbstractAsyncContextManager[Contender]]] = {
    "mico": mico,
    "mico-lexical": partial(mico, predictor=SHIPPED / LEXICAL_NAME),
    "bare": bare,
    "litellm": litellm,
    "smg": smg,
}


def tools_of(named: Path | None) -> Path:
    """The folder with the peers' programs: named, or that of the one in reach."""
    found = shutil.which("litellm") or shutil.which("smg")
    return named or (Path(found).parent if found else Path())
