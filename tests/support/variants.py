"""Folders of variants of a tiny model, and what each answers alone in transformers, adapter unmerged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from site_engine.core.chain import Variant
from site_engine.model.loader import LoadedModel
from tests.support.engine_models import family, greedy_answer

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Made:
    """A variant's folder, and the model of transformers that computes it."""

    variant: Variant
    alone: Any

    def answer(self, prompt: list[int], tokens: int, guess: list[int] | None = None) -> list[int]:
        return greedy_answer(self.alone, prompt, tokens, guess=guess)


def served(name: str = "llama") -> tuple[LoadedModel, Any]:
    """Return a model ready for an engine, and the same untouched."""
    one = family(name)
    return one.served, one.plain


def lora(
    folder: Path,
    plain: Any,
    *,
    rank: int = 4,
    seed: int = 0,
    targets: tuple[str, ...] = PROJECTIONS,
    rslora: bool = False,
    **settings: Any,
) -> Made:
    """Write a LoRA adapter as peft does; alone, each product is added to its module's output by a hook."""
    draw = torch.Generator().manual_seed(seed)
    alone, tensors = copy.deepcopy(plain), {}
    scale = 2 * rank / (sqrt(rank) if rslora else rank)
    for name, module in alone.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        down = torch.randn(rank, module.in_features, generator=draw) * 0.15
        up = torch.randn(module.out_features, rank, generator=draw) * 0.15
        key = f"base_model.model.{name}"
        tensors |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        module.register_forward_hook(_adding(down, up, scale))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "use_rslora": rslora,
        "target_modules": list(targets),
        **settings,
    }
    return Made(write_adapter(folder, config, tensors), alone)


def _adding(down: torch.Tensor, up: torch.Tensor, scale: float) -> Callable[..., torch.Tensor]:
    return lambda _, given, out: out + (given[0] @ down.T) @ up.T * scale


class Prefixed:
    """A model of transformers that finds keys and values of virtual tokens before every prompt."""

    def __init__(self, plain: Any, numbers: torch.Tensor) -> None:
        """`numbers` [tokens, 2 * layers, heads, dim]: the keys and the values of each layer in turn."""
        self._plain, self._numbers = plain, numbers.transpose(0, 1)

    def generate(self, ids: torch.Tensor, *, max_new_tokens: int, **_: Any) -> torch.Tensor:
        """Return the prompt and its greedy answer, each token from all before it."""
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids).logits[:, -1:].argmax(-1)], dim=1)
        return ids

    def __call__(self, ids: torch.Tensor) -> Any:
        cache = transformers.DynamicCache()
        for layer in range(len(self._numbers) // 2):
            key, value = self._numbers[2 * layer : 2 * layer + 2].transpose(1, 2)[:, None]
            cache.update(key, value, layer)
        with torch.no_grad():
            return self._plain(ids, past_key_values=cache)


def prefix_tuned(folder: Path, plain: Any, *, tokens: int = 6, seed: int = 0, **settings: Any) -> Made:
    """Write prefix tuning as peft does."""
    config = plain.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    dim = config.hidden_size // config.num_attention_heads
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(tokens, 2 * layers, heads, dim, generator=draw)
    said = {
        "peft_type": "PREFIX_TUNING",
        "task_type": "CAUSAL_LM",
        "num_virtual_tokens": tokens,
        "num_layers": layers,
        "num_attention_heads": heads,
        "token_dim": heads * dim,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
        **settings,
    }
    variant = write_adapter(folder, said, {"prompt_embeddings": numbers.flatten(1)})
    return Made(variant, Prefixed(plain, numbers))


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Variant:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return Variant(folder.name, adapter=str(folder))


def fine_tuned(folder: Path, plain: Any, change: Callable[[str], bool], *, seed: int = 0) -> Made:
    """Write a model of which the parameters that `change` names were trained, and nothing else."""
    draw = torch.Generator().manual_seed(seed)
    alone = copy.deepcopy(plain)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if change(name):
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    alone.save_pretrained(folder)
    return Made(Variant(folder.name, model=str(folder)), alone)


def zoo(folder: Path, plain: Any) -> list[Made]:
    """Return a variant of each kind: adapters of several ranks, some layers of one's own, biases."""
    made = [
        lora(folder / "rank-1", plain, rank=1, seed=1, targets=("q_proj", "v_proj")),
        lora(folder / "rank-4", plain, rank=4, seed=2),
        lora(folder / "rank-12", plain, rank=12, seed=3, targets=("o_proj", "down_proj", "lm_head")),
        lora(folder / "rs-rank-8", plain, rank=8, seed=4, rslora=True),
        fine_tuned(folder / "last-layer", plain, lambda name: ".layers.1." in name, seed=5),
        fine_tuned(
            folder / "head", plain, lambda name: "lm_head" in name or name == "model.norm.weight", seed=6
        ),
        fine_tuned(folder / "embedding", plain, lambda name: "embed_tokens" in name, seed=7),
        prefix_tuned(folder / "prefix", plain, seed=9),
    ]
    if any(name.endswith(".bias") for name, _ in plain.named_parameters()):
        made.append(fine_tuned(folder / "biases", plain, lambda name: name.endswith(".bias"), seed=8))
    return made
