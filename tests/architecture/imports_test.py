"""Who may import whom, and what a process must not drag in: the contracts and start-up probes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


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
