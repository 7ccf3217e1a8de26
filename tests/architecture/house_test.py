"""The house rules that can be executed: names, sizes, versions, the lock and the generated code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.private_functions import count

ROOT = Path(__file__).parents[2]
PACKAGES = ("mico", "gateway", "site_engine", "predictor", "wire", "migrations", "bench")
SOURCES = [
    file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")) if "_pb2" not in file.name
]
BANNED = {"util", "utils", "common", "helper", "helpers"}
FUNCTION_LINES = 50
MAY_BE_LONGER = ("/kernels/", "gateway/app.py", "site_engine/app.py", "migrations/versions/")
"""A kernel is one function; a process is composed and a revision of the database written in one."""
FILE_LINES = 450
USED_ONCE_SHARE = 0.13
"""Of all functions of the engine's site, those that are private and used once."""


def test_no_module_or_class_has_a_name_that_says_nothing() -> None:
    modules = [
        str(path)
        for path in relative(SOURCES)
        if BANNED & set("/".join(path.with_suffix("").parts).replace("/", "_").split("_"))
    ]
    classes = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES
        for name in outline(file).classes
        if BANNED & {word.lower() for word in camel_words(name)}
    ]
    assert modules + classes == []


def test_no_function_is_longer_than_fifty_lines() -> None:
    long = [name for name, lines in functions() if lines > FUNCTION_LINES]
    assert [name for name in long if not any(part in name for part in MAY_BE_LONGER)] == []


def test_no_file_is_longer_than_four_hundred_and_fifty_lines() -> None:
    files = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]
    long = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: lines for name, lines in long.items() if lines > FILE_LINES} == {}


def test_few_private_functions_of_a_site_are_used_once() -> None:
    counted = count(ROOT / "site_engine")
    assert counted.share <= USED_ONCE_SHARE, "\n".join(counted.used_once)


def test_the_median_function_is_small() -> None:
    lengths = sorted(lines for _, lines in functions())
    assert lengths[len(lengths) // 2] <= 10


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file in SOURCES
        if file.read_text().strip() and not outline(file).is_documented
    ]
    assert silent == []


def test_every_migration_says_whether_programs_of_before_can_go_on() -> None:
    silent = [
        file.name
        for file in sorted((ROOT / "migrations/versions").glob("*.py"))
        if not re.search(r"^additive = (True|False)$", file.read_text(), re.M)
    ]
    assert silent == [], "additive = True: the program of the schema before can use the tables, too"


def test_generated_code_equals_a_regeneration(tmp_path: Path) -> None:
    kinds = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *kinds, "wire/federation.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    for name in ("federation_pb2.py", "federation_pb2.pyi", "federation_pb2_grpc.py"):
        assert (ROOT / "wire" / name).read_text() == (tmp_path / "wire" / name).read_text(), (
            f"{name}: run ./dev wire"
        )


def test_the_changelog_ends_at_the_version_of_the_package() -> None:
    headings = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert headings[0] == project()["version"]


def test_the_lock_pins_every_dependency_within_its_bounds() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}
    extras = project()["optional-dependencies"]
    wanted = [
        *project()["dependencies"],
        *(need for needs in extras.values() for need in needs),
    ]
    for need in map(Requirement, wanted):
        (pin,) = pins[canonicalize_name(need.name)].specifier
        assert pin.operator == "=="
        assert need.specifier.contains(pin.version), f"{need} excludes the pinned {pin.version}"


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def relative(files: list[Path]) -> Iterator[Path]:
    return (file.relative_to(ROOT) for file in files)


def camel_words(name: str) -> list[str]:
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)


class Outline(NamedTuple):
    """What the rules ask of a file. `functions`: the name and the length in lines, docstring included."""

    is_documented: bool
    classes: list[str]
    functions: list[tuple[str, int]]


@cache
def outline(file: Path) -> Outline:
    module = ast.parse(file.read_text())
    found = Outline(ast.get_docstring(module) is not None, [], [])
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.functions.append((node.name, node.end_lineno - node.lineno + 1))
    return found


def functions() -> Iterator[tuple[str, int]]:
    """Every function outside the tests, with its length in lines."""
    for file in SOURCES:
        for name, lines in outline(file).functions:
            yield f"{file.relative_to(ROOT)}: {name}", lines
