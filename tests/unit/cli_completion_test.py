"""The shell completes commands: in a real bash, and by the protocol that zsh speaks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(_MICO_COMPLETE=source_bash mico)"
COMP_WORDS=(mico sites dr) COMP_CWORD=2
_mico_completion mico
echo "${COMPREPLY[@]}"
"""
ZSH = """
autoload -Uz compinit && compinit -u -D  # -D: no dump file
eval "$(_MICO_COMPLETE=source_zsh mico)"
(( $+functions[_mico_completion] )) && echo defined
"""


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """An environment where `mico` is this checkout's."""
    program = tmp_path / "mico"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mico "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


def shell(command: list[str], script: str, env: dict[str, str]) -> str:
    run = subprocess.run(
        command, input=script, capture_output=True, text=True, env=env, check=False, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_bash_completes_the_commands_of_a_group(outside: dict[str, str]) -> None:
    assert shell(["bash", "--norc"], BASH, outside).split() == ["drain"]


def test_zsh_is_told_names_and_what_they_are_for(outside: dict[str, str]) -> None:
    told = shell(
        ["mico"], "", {**outside, "_MICO_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "mico sites dr"}
    )
    assert '"drain":"Send no new queries; running ones finish."' in told
    if shutil.which("zsh"):
        assert shell(["zsh", "-f"], ZSH, outside).split() == ["defined"]


def test_the_script_is_shown_for_the_shell_that_asks(outside: dict[str, str]) -> None:
    script = shell(["bash", "--norc"], "mico --show-completion; true\n", outside)
    assert "complete -o default -F _mico_completion mico" in script
