"""The benchmark of variants runs at its smallest, finds adapters exact and merged weights equal to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from bench import variants

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "architectures": ["LlamaForCausalLM"],
}
SMALLEST = "--tenants 1,2 --rows 4 --slots 2 --rank 4 --steps 4 --prompt-tokens 8 --rounds 1 --device cpu"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for a name that will go
def test_all_phases_run_at_their_smallest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers.LlamaConfig(**SHAPE).save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["variants", "--model", str(tmp_path), *SMALLEST.split()])
    assert variants.main() == 0
    printed = capsys.readouterr().out
    records = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    held = {each["what"]: each["held"] for each in records[-1]["claims"]}
    assert held["exact: largest gap of an adapter's token"]
    assert held["exact: the same by the base, which must fail"]
    assert {each["phase"] for each in records if "phase" in each} == set(variants.PHASES)
    assert [each["same_answers"] for each in records if "speedup" in each and each["phase"] == "turns"] == [
        "4 of 4"
    ]
    happened = {each["during"].partition(":")[0] for each in records if "during" in each}
    assert happened == {"loading", "published", "in use", "removed", "calm"}
    assert "live: longest step" in printed.splitlines()[-2]
