"""Compile the kernels of models without a GPU: `python -m site_engine.engine.precompile 90 FOLDER ...`.

90 is the GPU's compute capability in tenths; a folder needs no more than its config.json. The steps that an
engine captures before it serves run over tensors without memory, and what they would launch is compiled into
Triton's cache (TRITON_CACHE_DIR) under the key by which the engine finds it, with what adapters of the usual
rank need. Does not know models that torch compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from site_engine.cuda.first_launch import launch_first
from site_engine.cuda.llama_forward import LlamaForward, llama_forward
from site_engine.engine.build import WARM_CONTEXT_TOKENS, device_runner, packed_runner
from site_engine.engine.loading import SLOTS_ON_GPU
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported
from site_engine.model.hf_attention import install_hook, probe_layers
from site_engine.model.loader import LoadedModel, context_tokens_of
from site_engine.text.detokenize import TokenNames
from site_engine.variants.projections import ADAPTER_SLOTS

DTYPE = torch.bfloat16
NOWHERE = torch.device("meta")
WARP_THREADS = 32


class Compiling:
    """A driver of Triton for an architecture that is not here: it loads and launches nothing."""

    class Loader:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": sys.maxsize}

        def load_binary(self, *given: object) -> tuple[int, int, int, int, int]:
            """Return module, function, registers, spills and the most threads."""
            return 0, 0, 0, 0, sys.maxsize

    utils = Loader()

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, WARP_THREADS)

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *given: None

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def model_of(folder: Path, device: torch.device = NOWHERE) -> LoadedModel:
    """Return a model in the shape of a folder's config.json. Raises ModelNotSupported and OSError."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    model.eval().requires_grad_(requires_grad=False)
    install_hook(model)
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=folder.name,
        revision="",
        context_tokens=context_tokens_of(config.get_text_config()),
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        vocabulary=TokenNames(),
        layers=probe_layers(model),
        dtype=DTYPE,
        device=device,
    )


def compile_steps(model: LoadedModel, slots: int = SLOTS_ON_GPU) -> int:
    """Compile what an engine launches by default with this model and its variants; return how many graphs.

    Raises ModelNotSupported for one whose layers are not fused.
    """
    forward = llama_forward(model)
    if forward is None:
        raise ModelNotSupported(f"{model.name}: the layers of {type(model.model).__name__} are not fused")
    settings = EngineSettings(slots=slots, kv_tokens=max(model.context_tokens, WARM_CONTEXT_TOKENS))
    arenas = (
        forward.arenas(ADAPTER_SLOTS, settings.adapter_rank) if isinstance(forward, LlamaForward) else None
    )
    runner = device_runner(model, settings, packed_runner(model, settings), forward, arenas)
    launch_first(model.device, model.dtype)
    count = runner.warm(min(WARM_CONTEXT_TOKENS, model.context_tokens))
    runner.rehearse()
    return count


def main(architecture: int, folders: Sequence[Path]) -> None:
    driver.set_active(Compiling(architecture))
    for folder in folders:
        count = compile_steps(model_of(folder))
        sys.stdout.write(f"{folder}: the kernels of {count} graphs, for sm_{architecture}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
