"""Start `mico` and engines of this checkout as `python -m` does, but by forking a process that has imported
what they import: for a site of a tiny model 6 CPU seconds, for a gateway 1.5.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.support.forked import fork, fork_command

OF_ENGINES = (
    "site_engine.engine.build",
    "site_engine.text.grammar",
    "transformers.models.llama.modeling_llama",
)
OF_SITES = ("mico.commands.processes", "site_engine.app", *OF_ENGINES)
OF_GATEWAYS = (
    *("mico.commands.processes", "mico.commands.database", "migrations"),
    *("gateway.http.app", "gateway.federation.server", "gateway.store.store"),
)
"""Not `gateway.app`: the ONNX runtime starts a thread as it is imported."""

spawn_engine = partial(fork, "site_engine.engine_process", *OF_ENGINES)
"""Starts the engine's process for a site of the test's own process."""


def start_site(config: Path, log: Path, environ: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Start a site; what it says is added to its log."""
    return start_mico(log, ("site", "--config", str(config)), environ)


def start_mico(
    log: Path, arguments: Sequence[str], environ: Mapping[str, str], module: str = "mico"
) -> subprocess.Popen[bytes]:
    """Start a command of `mico`, or of a module that takes the same; what it says is added to its log."""
    imports = OF_SITES if arguments[0] == "site" else OF_GATEWAYS
    with log.open("ab") as output:
        return fork_command(module, arguments, imports, output.fileno(), environ)
