"""The import contracts, and what the start of a process must not load."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_test_imports_the_benchmarks() -> None:
    assert importing("bench", "tests") == []


def test_nothing_that_is_shipped_imports_the_tests_or_the_benchmarks() -> None:
    shipped = ("mico", "gateway", "site_engine", "predictor", "wire", "migrations")
    assert [file for name in ("tests", "bench") for file in importing(name, *shipped)] == []


def test_the_gateway_process_loads_neither_torch_nor_scikit_learn() -> None:
    assert (
        loaded_by("import gateway.app") & {"torch", "transformers", "sklearn", "tokenizers", "pandas"}
        == set()
    )


def test_the_site_process_loads_nothing_of_the_gateway_or_of_prediction() -> None:
    loaded = loaded_by("import site_engine.app")
    assert loaded & {"gateway", "predictor", "litestar", "sqlalchemy", "sklearn", "onnxruntime"} == set()


def test_help_loads_nothing_heavy() -> None:
    heavy = {
        "torch",
        "transformers",
        "litestar",
        "sklearn",
        "numpy",
        "sqlalchemy",
        "grpc",
        "httpx",
        "onnxruntime",
    }
    assert loaded_by("from mico.cli import main", "main(['--help'])") & heavy == set()


def importing(package: str, *folders: str) -> list[str]:
    """Return the files under `folders` that import `package` or run one of its modules as a program."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [str(file.relative_to(ROOT)) for file in files if package in imported(file)]


@cache
def imported(file: Path) -> frozenset[str]:
    """Return the top-level package of each import of a file, and of each module that it names after `-m`."""
    return frozenset(found_imports(file))


def found_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Tuple | ast.List | ast.Call):
            values = node.args if isinstance(node, ast.Call) else node.elts
            words = [value.value if isinstance(value, ast.Constant) else None for value in values]
            for option, module in pairwise(words):
                if option == "-m" and isinstance(module, str):
                    yield module.split(".")[0]


def loaded_by(*statements: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after these statements."""
    lines = [
        *statements,
        "import json, sys",
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))",
    ]
    run = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))
