"""A place that can't be written to is told before the work that would be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from mico.cli import main


@pytest.mark.parametrize(
    "command",
    [
        "batch run in.jsonl -o file/out.jsonl",
        "batch fetch batch_1 -o file/out.jsonl",
        "simulate --plot file/plot.png",
        "predictor evaluate --data in.jsonl --out file/out.parquet",
        "predictor evaluate --data in.jsonl --report file/report",
        "predictor train in.jsonl file/artifact",
        "predictor export file/artifact",
    ],
)
def test_a_place_that_cant_be_written_to_is_told_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "in.jsonl"):
        Path(name).write_text("")
    assert main(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: nothing can be written to file")


def test_a_folder_that_is_not_there_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "artifact"
    assert main(["predictor", "export", str(out), "--artifact", "lexical"]) == 0
    assert {file.name for file in out.iterdir()} == {"card.json", "model.onnx"}
    assert "lexical-v1" in capsys.readouterr().out
