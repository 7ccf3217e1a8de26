"""Start `mico site` of this checkout as `python -m mico` does, but by forking a process that has imported
what a site of a tiny model imports, for 6 CPU seconds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.forked import fork_command

IMPORTS = (
    "mico.commands.processes",
    "site_engine.app",
    "site_engine.engine.build",
    "site_engine.text.grammar",
    "transformers.models.llama.modeling_llama",
)


def start_site(config: Path, log: Path, environ: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Start a site; what it says is added to its log."""
    with log.open("ab") as output:
        return fork_command("mico", ("site", "--config", str(config)), IMPORTS, output.fileno(), environ)
