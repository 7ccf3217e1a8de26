"""Everything that touches the insides of transformers: loading, the attention hook, the probe, certification.

A model runs unmodified, on packed tokens; the current iteration's context answers its attention calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface

from site_engine.model import attention_context, attention_op, certify
from site_engine.model.cpu_optimize import suit_cpu
from site_engine.model.kv_cache import LayerShape
from site_engine.text.detokenize import Vocabulary
from site_engine.text.vocabulary import vocabulary_of

ATTENTION = "mico"  # unknown to the mask registry, so that no [tokens, tokens] mask is ever built
LEGACY = ("GPTNeoForCausalLM", "GPTJForCausalLM", "CodeGenForCausalLM")
DEFAULT_CONTEXT_TOKENS = 2048


class CannotServe(Exception):
    """A model that this engine would not serve exactly; the message says why."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A certified model. `layers` has one shape per attention call, in the order of the calls."""

    model: Any
    tokenizer: Any
    name: str
    revision: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    vocabulary: Vocabulary
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """ids and positions [1, tokens] -> logits [wanted, vocabulary], in the current attention context."""
        return _forward(self.model, ids, positions, wanted)


def load(source: str, *, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """A folder or a Hub id, in safetensors. Raises CannotServe with the reason."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), use_safetensors=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CannotServe(f"cannot load {source!r}: {error}") from error
    model = suit_cpu(model.to(device))
    return from_model(model, tokenizer, name=Path(source).name, revision=_revision(source, model))


def from_model(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str = "model",
    revision: str = "unversioned",
    eos_token_ids: Iterable[int] | None = None,
) -> LoadedModel:
    """Take a model that is in memory: hook it, certify it. Raises CannotServe with the reason."""
    model.eval()
    config = model.config.get_text_config()
    prompts = certify.sample_prompts(config.vocab_size)
    with _refusing(model):
        expected = _plain_logits(model, prompts)
        _hook(model)
        layers = _probe(model)
        off = certify.largest_difference(partial(_forward, model), layers, prompts, expected)
    parameter = next(model.parameters())
    tolerance = certify.TOLERANCE.get(parameter.dtype, 0.0)
    if off > tolerance:
        raise CannotServe(
            f"{type(model).__name__} computes other logits on packed tokens than alone: they differ by "
            f"{off:.1e} of the largest (limit {tolerance:.0e})"
        )
    eos = model.generation_config.eos_token_id if eos_token_ids is None else tuple(eos_token_ids)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        context_tokens=_context_tokens(config),
        vocab_size=config.vocab_size,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        vocabulary=vocabulary_of(tokenizer),
        layers=layers,
        dtype=parameter.dtype,
        device=parameter.device,
    )


def _forward(model: Any, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
    ).logits[0]
    return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]


@contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """Whatever a model raises while it is tried out is a reason not to serve it."""
    try:
        yield
    except CannotServe as error:
        raise CannotServe(f"{type(model).__name__}: {error}") from error
    except Exception as error:
        raise CannotServe(
            f"{type(model).__name__} cannot run on packed tokens: {type(error).__name__}: {error}"
        ) from error


# ---- the hook


def _attention(  # noqa: PLR0917 - transformers' own signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [1, heads, tokens, dim] -> [1, tokens, heads, value dim]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        return attention_op.attend(query, key, value, scale, sliding_window, softcap, s_aux), None
    running = attention_context.current()
    if isinstance(running, _Probe):
        running.inspect(module, attention_mask, other)
    scoring = attention_context.Scoring(scale, sliding_window, softcap, s_aux)
    out = running.attend(query[0], key[0], value[0], scoring)
    return out[None], None


def _hook(model: Any) -> None:
    AttentionInterface.register(ATTENTION, _attention)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(ATTENTION)
    elif type(model).__name__ in LEGACY:
        _bind_legacy(model)
    else:
        raise CannotServe("its attention cannot be replaced")


def _bind_legacy(model: Any) -> None:
    """GPT-Neo, GPT-J and CodeGen are older than the attention interface: answer their `_attn` methods."""
    for module in model.modules():
        if hasattr(module, "_attn"):
            module._attn = partial(_legacy_attention, module)
    model.config._attn_implementation_internal = ATTENTION  # so that no mask is built


def _legacy_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    """-> [1, heads, tokens, dim]. GPT-Neo does not scale, and sees a window in its local layers."""
    scale = 1.0 / float(getattr(module, "scale_attn", 1.0))
    local = getattr(module, "attention_type", "global") == "local"
    window = module.config.window_size if local else None
    query, key = query.to(value.dtype), key.to(value.dtype)
    out, _none = _attention(module, query, key, value, None, scaling=scale, sliding_window=window)
    return out.transpose(1, 2), None


class _Probe:
    """A forward pass that only looks: the geometry of every attention call, and what we could not honour."""

    HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "input_ids"})

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def inspect(self, module: torch.nn.Module, mask: torch.Tensor | None, other: dict[str, Any]) -> None:
        tensors = [name for name, thing in other.items() if isinstance(thing, torch.Tensor)]
        unknown = sorted(set(tensors) - self.HARMLESS)
        if unknown:
            raise CannotServe(f"its attention takes {', '.join(unknown)}, which this engine does not know")
        if mask is not None:
            raise CannotServe("it builds its own attention mask")
        if not other.get("is_causal", True) or not getattr(module, "is_causal", True):
            raise CannotServe("its attention is not causal")

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: attention_context.Scoring
    ) -> torch.Tensor:
        self.layers.append(LayerShape(key.shape[0], key.shape[2], value.shape[2]))
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def _probe(model: Any) -> tuple[LayerShape, ...]:
    probe = _Probe()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 3, dtype=torch.long, device=device)
    with torch.inference_mode(), attention_context.use(probe):
        model(input_ids=ids, position_ids=torch.arange(3, device=device)[None], use_cache=False)
    if not probe.layers:
        raise CannotServe("it never calls the attention interface")
    return tuple(probe.layers)


def _plain_logits(model: Any, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Logits of every place of every prompt [tokens, vocabulary], by the model as transformers runs it."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in prompts
        ]


# ---- what a model says of itself


def _context_tokens(config: Any) -> int:
    """Prompt and response together. Rotary scalings that change with the longest row of a batch, and
    attention in chunks, are exact only within the first window, so the context ends there.
    """
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
    limit = next((found for name in names if (found := getattr(config, name, None))), DEFAULT_CONTEXT_TOKENS)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limit = min(limit, config.attention_chunk_size)
    return int(limit)


def _revision(source: str, model: Any) -> str:
    """A Hub commit, or a digest of the folder's configuration and of the ends of its weight files."""
    folder = Path(source)
    if not folder.is_dir():
        return str(getattr(model.config, "_commit_hash", None) or "unversioned")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:12]
