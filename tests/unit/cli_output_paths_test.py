"""A place that can't be written to is told before the work that would be lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mico.cli import main
from mico.errors import CommandFailed
from mico.output_paths import create_folder


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
        "predictor export file",
        "predictor update artifact in.jsonl --out file",
    ],
)
def test_a_place_that_cant_be_written_to_is_told_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "in.jsonl"):
        Path(name).write_text("")
    Path("artifact").mkdir()
    assert main(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: nothing can be written to file")


def test_a_folder_that_is_not_there_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "artifact"
    assert main(["predictor", "export", str(out), "--artifact", "lexical"]) == 0
    assert {file.name for file in out.iterdir()} == {"card.json", "model.onnx"}
    assert "lexical-v2" in capsys.readouterr().out


def test_what_is_read_is_never_written_over_nor_a_folder_taken_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.parquet").write_text("kept")
    for out in ("data.parquet", "./data.parquet", "."):
        assert main(["predictor", "evaluate", "--data", "data.parquet", "--out", out]) == 2
        assert capsys.readouterr().err.startswith("error: nothing can be written to")
    assert Path("data.parquet").read_text() == "kept"


def test_a_folder_that_may_not_be_written_to_is_told_before_the_work(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o500)
    if os.access(kept, os.W_OK):
        pytest.skip("nothing is forbidden to this user")
    with pytest.raises(CommandFailed, match="nothing can be written"):
        create_folder(kept)
