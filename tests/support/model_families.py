"""Tiny random models of the causal types that transformers knows, and a check that the engine serves them."""

from __future__ import annotations

import copy
import random
import time
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from site_engine.core.request import Request, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported
from site_engine.model.loader import from_model

VOCAB = 99
CONTEXT = 128
WINDOW = 16
MAX_PARAMETERS = 20_000_000
LENGTHS = ((3, 6), (9, 4), (25, 8), (1, 5), (14, 10), (30, 6))  # prompt, response

_SHRUNK: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), CONTEXT),
    **dict.fromkeys(("sliding_window", "window_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "mlp_only_layers": [],
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "deepseek_v2": {"num_experts_per_tok": 2},  # without a number by default
    "gemma3": {"mm_tokens_per_image": 4},
}
_TINY_SIGHT = {"image_size": 28, "patch_size": 14}


class Verdict(NamedTuple):
    """exact, wrong, refused (with the engine's reason), or untried (no tiny model could be made)."""

    kind: str
    detail: str = ""


def tiny_config(model_type: str) -> Any:
    """Return the type's configuration with every known size shrunk. Raises the type's own error if it rejects
    them.
    """
    made = CONFIG_MAPPING[model_type]
    default = made()
    known = _sizes(default)
    if hasattr(default, "text_config"):  # a model that sees too: only its text is tried
        known["text_config"] = tiny_config(default.text_config.model_type).to_dict()
    if hasattr(default, "vision_config"):
        known["vision_config"] = _sizes(default.vision_config) | _TINY_SIGHT
    if getattr(default, "kv_lora_rank", None):  # latent attention has as many key as query heads
        known = {**known, "num_key_value_heads": 4}
        known.pop("head_dim", None)
    known = {**known, **_SPECIAL.get(model_type, {}), "eos_token_id": None}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    try:  # one layer of each kind where there are two
        return made(**known, layer_types=(kinds * 2)[:2]) if kinds else made(**known)
    except Exception:  # noqa: BLE001 - some derive their kinds from other sizes and reject given ones
        return made(**known)


def _sizes(default: Any) -> dict[str, Any]:
    """Return the shrunk sizes that a configuration has."""
    return {
        name: size
        for name, size in _SHRUNK.items()
        if hasattr(default, name)
        and (getattr(default, name) is not None or name in {"num_key_value_heads", "n_inner"})
    }


def random_model(config: Any, seed: int = 0) -> Any:
    """Make a model with weights so large that greedy answers are not one token repeated."""
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            elif "bias" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def try_family(model_type: str) -> Verdict:
    """Serve six mixed requests and compare with `generate` run on each alone."""
    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            size = sum(
                one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters()
            )
        if size > MAX_PARAMETERS:
            return Verdict("untried", f"{size / 1e6:.0f} M parameters: its sizes were not found")
        plain = random_model(config)
    except Exception as error:  # noqa: BLE001 - foreign configurations fail in every way
        return Verdict("untried", f"no tiny model: {type(error).__name__}: {str(error).splitlines()[0]}")
    try:
        served = from_model(copy.deepcopy(plain), eos_token_ids=())
    except ModelNotSupported as refusal:
        return Verdict("refused", str(refusal))
    engine = packed_engine(
        served, EngineSettings(slots=4, token_budget=16, page_size=4, kv_tokens=512), time.monotonic
    )
    rnd = random.Random(1)
    prompts = [([rnd.randrange(2, VOCAB) for _ in range(prompt)], length) for prompt, length in LENGTHS]
    for at, (prompt, length) in enumerate(prompts):
        engine.submit(Request(str(at), prompt, Sampling(max_tokens=length, temperature=0.0)))
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    cached = sum(answers[str(at)] == _generate(plain, *one, use_cache=True) for at, one in enumerate(prompts))
    if cached == len(prompts):
        return Verdict("exact", f"{cached} of {len(prompts)}")
    whole = sum(answers[str(at)] == _generate(plain, *one, use_cache=False) for at, one in enumerate(prompts))
    if whole == len(prompts):
        return Verdict("exact", "as without a cache; with its own cache transformers answers differently")
    return Verdict("wrong", f"{whole} of {len(prompts)}")


def _generate(model: Any, prompt: list[int], length: int, *, use_cache: bool) -> list[int]:
    with torch.no_grad():
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=use_cache,
        )
    found: list[int] = answer[0, len(prompt) :].tolist()
    return found
