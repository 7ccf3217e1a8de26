"""Peers of an engine with adapters: adapters merged into the weights one after the other, and peft."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from bench.support.variant_engines import Query, Scene, serve
from site_engine.variants.certify import plain_model
from site_engine.variants.changes import LoadedVariant


@contextmanager
def merged(model: Any, variant: LoadedVariant) -> Iterator[None]:
    """Add an adapter's products to the weights of a model, as a model folder of the variant has them."""
    kept = []
    for name, change in variant.changes.items():
        assert change.low_rank is not None
        weight = model.get_submodule(name).weight.data
        down, up, scale = change.low_rank
        kept.append((weight, weight.clone()))
        down, up = (factor.to(weight.device).float() for factor in (down, up))
        weight += (scale * (up @ down)).to(weight.dtype)
    try:
        yield
    finally:
        for weight, before in kept:
            weight.copy_(before)


def serve_in_turn(scene: Scene, work: Sequence[Query], tokens: int) -> tuple[float, list[list[int]]]:
    """Serve each variant's queries alone, by the engine without variants and its merged weights.

    Counts only the time of serving: as if a process for each model were there, and each had the device to
    itself in turn. `work` is sorted by chain.
    """
    took_s, answers = 0.0, []
    for chain, queries in groupby(work, key=lambda query: query.chain):
        with merged(scene.base._model.model, scene.loaded(chain)):
            part_s, part = serve(scene.base, [Query("", query.prompt) for query in queries], tokens)
        took_s += part_s
        answers += part
    return took_s, answers


class PeftMixed:
    """transformers with peft, which computes rows of several adapters in one batch by `adapter_names`.

    Shares the base's weights. Raises ImportError without peft.
    """

    def __init__(self, scene: Scene, chains: Sequence[str], folder: Path) -> None:
        peft: Any = importlib.import_module("peft")
        base = plain_model(scene.model.model)
        base.set_attn_implementation("sdpa")
        torch.backends.cuda.enable_cudnn_sdp(True)  # as PyTorch has it, which certifying engines leave out
        first, *others = chains
        self._device = scene.model.device
        plainly = {"autocast_adapter_dtype": False, "low_cpu_mem_usage": True}
        self._model = peft.PeftModel.from_pretrained(base, str(folder / first), adapter_name=first, **plainly)
        for chain in others:
            self._model.load_adapter(str(folder / chain), adapter_name=chain, **plainly)
        self._model.eval()

    def serve(self, work: Sequence[Query], tokens: int) -> tuple[float, list[list[int]]]:
        """Answer prompts of one length; return the seconds and the answers."""
        ids = torch.tensor([query.prompt for query in work], device=self._device)
        began = time.perf_counter()
        with torch.inference_mode():
            whole = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                adapter_names=[query.chain for query in work],
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - began, whole[:, ids.shape[1] :].tolist()
