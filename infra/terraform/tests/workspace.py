"""A copy of the Terraform tree to run commands in, so that nothing is ever written beside the sources."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1]
SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
LEFT_BEHIND = shutil.ignore_patterns(".terraform*", "*.tfstate*", "__pycache__", "tests", ".run")


@dataclass(frozen=True, slots=True)
class Workspace:
    """A copied tree and the environment of the commands that run in it."""

    root: Path
    environment: Mapping[str, str]

    def terraform(self, folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one command in a folder of the tree; its output is returned, never raised."""
        return subprocess.run(
            ["terraform", f"-chdir={self.root / folder}", *arguments, "-no-color"],
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Replace the text of one file during the block."""
        path = self.root / file
        before = path.read_text()
        path.write_text(text)
        try:
            yield
        finally:
            path.write_text(before)


def copy_tree(target: Path, environment: Mapping[str, str], cli_config: str = "") -> Workspace:
    """Copy the tree; cli_config is Terraform's own configuration, such as a provider mirror."""
    root = target / "terraform"
    shutil.copytree(SOURCE, root, symlinks=True, ignore=LEFT_BEHIND)
    config = target / "terraform.rc"
    config.write_text(cli_config)
    settings = {"TF_CLI_CONFIG_FILE": str(config), "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
    settings["GOGC"] = "400"  # a fifth of a command's time is the collection of what it soon leaves anyway
    return Workspace(root, {**environment, **settings})


def mirror_config(mirror: str) -> str:
    """Return a CLI configuration that takes providers from a folder and from nowhere else."""
    return f'provider_installation {{\n  filesystem_mirror {{\n    path = "{mirror}"\n  }}\n}}\n'
