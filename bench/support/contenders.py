"""Start each gateway of a comparison in front of the scripted upstream."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from mico.local.plan import free_port
from predictor.artifact import LEXICAL_NAME, SHIPPED
from tests.support.gateway_process import (
    GatewayProcess,
    Workspace,
    interpreter,
    mico,
    process,
    wait_until_answering,
)
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
async def litellm(workspace: Workspace) -> AsyncIterator[GatewayProcess]:
    """Start one worker with a master key and no database: its lightest form with authentication."""
    config, port = workspace.folder / "litellm.yaml", free_port()
    config.write_text(LITELLM.format(model=MODEL, port=workspace.upstream_port, key=KEY))
    command = (workspace.tools / "litellm", "--config", config, "--port", port, "--num_workers", 1)
    async with process("litellm", workspace, *command, "--host", "127.0.0.1") as started:
        await wait_until_answering(f"http://127.0.0.1:{port}/health/liveliness", started, workspace.folder)
        yield GatewayProcess("litellm", port, KEY, started, workspace.folder / "litellm.log")


@asynccontextmanager
async def smg(workspace: Workspace) -> AsyncIterator[GatewayProcess]:
    port, metrics = free_port(), free_port()
    worker = ("--worker-urls", f"http://127.0.0.1:{workspace.upstream_port}", "--policy", "round_robin")
    own = ("--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics, "--api-key", KEY)
    async with process("smg", workspace, workspace.tools / "smg", "launch", *worker, *own) as started:
        await wait_until_answering(f"http://127.0.0.1:{port}/readiness", started, workspace.folder)
        yield GatewayProcess("smg", port, KEY, started, workspace.folder / "smg.log")


@asynccontextmanager
async def bare(workspace: Workspace) -> AsyncIterator[GatewayProcess]:
    port = free_port()
    ports = ("--http-port", port, "--grpc-port", workspace.link_port)
    command = (*interpreter(workspace), "-m", "bench.studies.bare", *ports)
    async with process("bare", workspace, *command) as started:
        await wait_until_answering(f"http://127.0.0.1:{port}/ready", started, workspace.folder)
        yield GatewayProcess("bare", port, "none", started, workspace.folder / "bare.log")


CONTENDERS: dict[str, Callable[[Workspace], AbstractAsyncContextManager[GatewayProcess]]] = {
    "mico": mico,
    "mico-lexical": partial(mico, predictor=SHIPPED / LEXICAL_NAME),
    "bare": bare,
    "litellm": litellm,
    "smg": smg,
}


def tools_of(named: Path | None) -> Path:
    """Return the folder of the peers' programs: the named one, or that of the one on the PATH."""
    found = shutil.which("litellm") or shutil.which("smg")
    return named or (Path(found).parent if found else Path())
