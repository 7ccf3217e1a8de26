"""Prose that is run: the file map against the tree, and every example in a document against the tools."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
PROSE = [*DOCUMENTS, *sorted((ROOT / "bench").rglob("*.md")), *sorted((ROOT / "infra").rglob("*.md"))]
PROGRAM = re.compile(r"python -m ([a-z_][\w.]*)|`((?:bench|tests)\.[a-z_][\w.]*)")
NAMED_TEST = re.compile(r"`(tests/[\w/]+_test\.py)::(test_\w+)`")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
NAMED_LINK = re.compile(r"\[`([\w./-]+\.\w+)`\]\((?!https?://)([^)#\s]+)")
QUOTED_PATH = re.compile(r"`(?:\./)?([\w.-]+/[\w./-]*)(?::{1,2}(\w+))?`")
NAME_IN_PATH = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`\s+(?:in|of)\s+\[?`([\w./-]+\.py)`")
PLACEHOLDER = re.compile(r"NAME|NUMBER")


def test_the_file_map_names_what_exists_and_all_that_stands_at_the_top() -> None:
    listed = [line.split()[0].rstrip("/") for line in file_map() if line.strip()]
    assert [name for name in listed if not (ROOT / name).exists()] == []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in tracked.splitlines()}
    assert {name for name in top if not name.startswith(".")} - {
        name.split("/")[0] for name in listed
    } == set()


@pytest.mark.parametrize("document", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_that_shows_a_path_leads_to_it(document: Path) -> None:
    named = NAMED_LINK.findall(document.read_text())
    assert [shown for shown, target in named if not f"/{target}".endswith(f"/{shown}")] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_paths_and_names_in_them_exist(document: Path) -> None:
    """A path counts as one of the repository if it begins with a folder that stands at its top."""
    text = document.read_text()
    quoted = [(path, name) for path, name in QUOTED_PATH.findall(text) if is_ours(path)]
    assert [path for path, _ in quoted if not (ROOT / path).exists()] == []
    named = [(path, name) for path, name in quoted if name]
    named += [(path, name) for name, path in NAME_IN_PATH.findall(text) if is_ours(path)]
    assert [f"{path}: {name}" for path, name in named if missing_names(ROOT / path, name)] == []


@pytest.mark.parametrize("document", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_quoted_programs_exist(document: Path) -> None:
    quoted = {one or other for one, other in PROGRAM.findall(document.read_text())}
    assert [name for name in sorted(quoted) if not exists(name.rstrip("."))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_shell_examples_parse(document: Path) -> None:
    for example in examples(document, "sh", "bash"):
        run = subprocess.run(["bash", "-n"], input=example, capture_output=True, text=True, check=False)
        assert run.returncode == 0, f"{example}\n{run.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_parse(document: Path) -> None:
    for example in examples(document, "python"):
        assert compile(example, document.name, "exec")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_name_commands_and_options_that_exist(document: Path) -> None:
    assert [problem for line in command_lines(document) for problem in unknown_parts(line)] == []


def test_every_promise_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "api-promises.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| Promise ")]
    assert [row for row in rows if not NAMED_TEST.search(row)] == []
    named = NAMED_TEST.findall(page)
    assert [f"{file}::{name}" for file, name in named if name not in names_of_tests(ROOT / file)] == []


def is_ours(path: str) -> bool:
    top = path.partition("/")[0]
    return "/" in path and top != ".." and (ROOT / top).is_dir() and not PLACEHOLDER.search(path)


def missing_names(file: Path, dotted: str) -> set[str]:
    """Return the parts of a dotted name that the file neither defines nor assigns."""
    text = file.read_text()
    return {
        name
        for name in dotted.split(".")
        if not re.search(
            rf"^\s*(?:(?:async )?def|class) {name}\b|\b{name}\b(?:: [^=\n]+)? = |^\s+{name}: ", text, re.M
        )
    }


def names_of_tests(file: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M)) if file.exists() else set()


def exists(module: str) -> bool:
    """Return whether a module of this repository or an installed package exists, without importing it."""
    top, place = module.partition(".")[0], ROOT / module.replace(".", "/")
    if (ROOT / top).is_dir():
        return place.is_dir() or place.with_suffix(".py").exists()
    return find_spec(top) is not None


def file_map() -> list[str]:
    """The lines of the fenced block that follows the heading `## File map`."""
    after = (ROOT / "README.md").read_text().partition("## File map")[2]
    return FENCE.search(after).group(2).splitlines()


def examples(document: Path, *languages: str) -> Iterator[str]:
    return (body for language, body in FENCE.findall(document.read_text()) if language in languages)


def command_lines(document: Path) -> Iterator[list[str]]:
    """The words of each `mico …`, `./dev up …` and `./dev down …` in the document's shell examples."""
    for example in examples(document, "sh", "bash"):
        for line in example.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["mico"] or words[:2] in (["./dev", "up"], ["./dev", "down"]):
                yield words[1:]


def unknown_parts(words: list[str]) -> Iterator[str]:
    from mico.cli import command_tree

    command = command_tree()
    spoken, is_given_options = "mico", False  # a group that runs itself, with options and their values
    for word in words:
        inner = None if is_given_options else getattr(command, "commands", None)
        if inner is not None and not word.startswith("-"):
            if word not in inner:
                yield f"{spoken} {word}: no such command"
                return
            command, spoken = inner[word], f"{spoken} {word}"
        elif word.startswith("--") and word.split("=")[0] not in option_names(command):
            yield f"{spoken} {word}: no such option"
        is_given_options |= word.startswith("-") and getattr(command, "invoke_without_command", False)


def option_names(command: Any) -> set[str]:
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return options | {"--help"}
