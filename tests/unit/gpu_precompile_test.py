"""Kernels compiled where there is no GPU are those that an engine looks for: its steps add none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import interpreted  # noqa: F401 - skips where there is no Triton

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
SLOTS = 16  # rather than 256: half of the variants of every kernel, and half of the time
COMPILER = f"""
import sys
from pathlib import Path
from site_engine.engine import precompile
precompile.compile_steps.__defaults__ = ({SLOTS},)
precompile.main(90, [Path(sys.argv[1])])
"""
ENGINE = f"""
import sys
from pathlib import Path
import torch
from triton.runtime import driver
from site_engine.cuda import attention, cuda_graph
from site_engine.engine.precompile import Compiling, compile_steps, model_of

class OnGpu(attention.DeviceContext):
    def __init__(self, *given):
        super().__init__(*given)
        self.pdl = self.decodes_only

cuda_graph.DeviceContext = OnGpu
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # no kernel writes what it is given
torch.Tensor.new_empty = torch.Tensor.new_zeros
# nor does any kernel depend on what torch multiplies
torch.nn.functional.linear = lambda given, weight, bias=None: given.new_zeros(*given.shape[:-1], len(weight))
driver.set_active(Compiling(90))
compile_steps(model_of(Path(sys.argv[1]), torch.device("cpu")), {SLOTS})
"""


def test_an_engine_finds_the_kernels_that_were_compiled_without_memory(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    run("-c", COMPILER, str(folder), cache=cache)
    compiled = entries(cache)
    needed = {"decode_rows", "skinny_gemm_rows", "sample_rows", "rule_rows", "adapted_gemm_rows"}
    assert needed <= set(compiled.values())
    run("-c", ENGINE, str(folder), cache=cache)
    assert entries(cache) == compiled


def run(*arguments: str, cache: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**kept, "TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def entries(cache: Path) -> dict[str, str]:
    """Return the kernels of a cache by the folder that each has for its key."""
    return {binary.parent.name: binary.stem for binary in cache.rglob("*.cubin")}
