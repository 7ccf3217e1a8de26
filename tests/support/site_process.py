"""Start `mico site` and engines of this checkout as `python -m` does, but by forking a process that has
imported what a site of a tiny model imports, for 6 CPU seconds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.support.forked import fork, fork_command

OF_ENGINES = (
    "site_engine.engine.build",
    "site_engine.text.grammar",
    "transformers.models.llama.modeling_llama",
)
OF_SITES = ("mico.commands.processes", "site_engine.app", *OF_ENGINES)

spawn_engine = partial(fork, "site_engine.engine_process", *OF_ENGINES)
"""Starts the engine's process for a site of the test's own process."""


def start_site(config: Path, log: Path, environ: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Start a site; what it says is added to its log."""
    with log.open("ab") as output:
        return fork_command("mico", ("site", "--config", str(config)), OF_SITES, output.fileno(), environ)
