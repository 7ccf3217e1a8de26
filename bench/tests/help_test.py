"""Every benchmark describes itself and its options under --help, and measures nothing meanwhile."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1]
PROGRAMS = [
    ".".join(("bench", *file.relative_to(BENCH).with_suffix("").parts))
    for file in sorted([*BENCH.glob("*.py"), *BENCH.glob("studies/*.py")])
    if "def main(" in file.read_text()
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = import_module(name)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert printed.startswith("usage: ")
    assert " ".join(str(program.__doc__).split())[:40] in " ".join(printed.split())
