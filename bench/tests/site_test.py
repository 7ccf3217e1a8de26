"""The benchmark of a site runs at its smallest, and all arrangements answer alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from bench import site

SMALLEST = "--real 5 --simulated 5,20 --rows 2 --queries 1 --steps 2 --context-tokens 256 --device cpu"


def test_engines_and_simulation_run_at_their_smallest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    transformers.Qwen2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["site", "--model", str(tmp_path), *SMALLEST.split()])
    assert site.main() == 0
    lines = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in lines]
    assert {each["engines"]["common batches"] for each in records if "engines" in each} == {2}
    assert [each["same_answers"] for each in records if "same_answers" in each] == ["5 of 5"]
    claimed = [each["what"] for each in records[-1]["claims"]]
    assert [what for what in claimed if what.startswith("20: ")] == [
        "20: times the tokens/s of process per model",
        "20: times the tokens/s of shared parameters",
        "20: p95 of process per model",
    ]
    assert sum("simulated tokens/s" in what for what in claimed) == 3
