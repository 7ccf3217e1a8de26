"""Everything that touches the insides of transformers: loading, the attention hook, the probe, certification.

A model runs unmodified, on packed tokens; the current iteration's context answers its attention calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface

from site_engine import context
from site_engine.attention.arena import Arena, LayerShape
from site_engine.detokenize import ByteVocabulary, DecodingVocabulary, NoText, Vocabulary
from site_engine.kv import PagePool
from site_engine.request import Request, Sampling
from site_engine.runner import PackedRunner
from site_engine.scheduler import Entry, Plan

ATTENTION = "mico"  # unknown to the mask registry, so that no [tokens, tokens] mask is ever built
DEFAULT_CONTEXT_TOKENS = 2048
CERTIFY_LENGTHS = (37, 12, 1)
CERTIFY_CHUNK = 16
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the largest logit


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
        logits: torch.Tensor = self.model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
        ).logits[0]
        return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]


def load(source: str, *, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    """A folder or a Hub id, in safetensors. Raises CannotServe with the reason."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), use_safetensors=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CannotServe(f"cannot load {source!r}: {error}") from error
    return from_model(model.to(device), tokenizer, name=Path(source).name, revision=_revision(source, model))


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
    prompts = _certify_prompts(config.vocab_size)
    expected = _plain_logits(model, prompts)
    _hook(model)
    layers = _probe(model)
    parameter = next(model.parameters())
    eos = model.generation_config.eos_token_id if eos_token_ids is None else tuple(eos_token_ids)
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        context_tokens=_context_tokens(config),
        vocab_size=config.vocab_size,
        eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        vocabulary=NoText() if tokenizer is None else _vocabulary(tokenizer),
        layers=layers,
        dtype=parameter.dtype,
        device=parameter.device,
    )
    _certify(loaded, prompts, expected)
    return loaded


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
    running = context.current()
    if isinstance(running, _Probe):
        running.inspect(module, attention_mask, other)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = context.Scoring(scale, sliding_window, softcap, s_aux)
    out = running.attend(query[0], key[0], value[0], scoring)
    return out[None], None


def _hook(model: Any) -> None:
    AttentionInterface.register(ATTENTION, _attention)
    if not model._can_set_attn_implementation():
        raise CannotServe(f"{type(model).__name__} does not let its attention be replaced")
    model.set_attn_implementation(ATTENTION)


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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: context.Scoring
    ) -> torch.Tensor:
        self.layers.append(LayerShape(key.shape[0], key.shape[2], value.shape[2]))
        return value.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def _probe(model: Any) -> tuple[LayerShape, ...]:
    probe = _Probe()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 3, dtype=torch.long, device=device)
    try:
        with torch.inference_mode(), context.use(probe):
            model(input_ids=ids, position_ids=torch.arange(3, device=device)[None], use_cache=False)
    except (TypeError, AttributeError) as error:
        raise CannotServe(f"it cannot run on packed tokens with explicit positions: {error}") from error
    if not probe.layers:
        raise CannotServe("it never calls the attention interface")
    return tuple(probe.layers)


# ---- certification


def _certify_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (n + 3,), generator=generator).tolist() for n in CERTIFY_LENGTHS]


def _plain_logits(model: Any, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Logits of every place of every prompt [tokens, vocabulary], by the model as transformers runs it."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in prompts
        ]


def _certify(loaded: LoadedModel, prompts: Sequence[list[int]], expected: Sequence[torch.Tensor]) -> None:
    """Run the prompts through pages, chunks and decode steps in one batch; refuse a model that differs."""
    pool = PagePool(sum(-(-len(ids) // 4) for ids in prompts), page_size=4)
    arena = Arena(loaded.layers, pool.capacity, 4, loaded.dtype, loaded.device)
    runner = PackedRunner(loaded.forward, arena, slots=len(prompts), pages_per_row=pool.capacity)
    requests = [Request(str(row), ids, Sampling()) for row, ids in enumerate(prompts)]
    for row, request in enumerate(requests):
        request.row, request.pages = row, pool.take(pool.pages_for(len(request.tokens))) or []
    tolerance = TOLERANCE.get(loaded.dtype, 2e-3)
    while plan := _certify_plan(requests):
        rows = runner.run(plan).rows
        wanted = torch.stack(
            [expected[entry.request.row][entry.start + entry.length - 1] for entry in plan.entries]
        )
        off = float((rows.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1.0))
        if not off <= tolerance:
            raise CannotServe(
                f"its logits on packed tokens differ from its own by {off:.1e} of the largest "
                f"(limit {tolerance:.0e})"
            )


def _certify_plan(requests: Sequence[Request]) -> Plan:
    """Prompts in chunks, then their last three tokens one by one, as if they had been generated."""
    plan = Plan()
    for request in requests:
        start, left = request.computed, len(request.tokens) - request.computed
        if left > 3:
            length = min(CERTIFY_CHUNK, left - 3)
            plan.prefills.append(Entry(request, start, length, samples=True))
        elif left:
            length = 1
            plan.decodes.append(Entry(request, start, length, samples=True))
        else:
            continue
        request.computed += length
    return plan


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


def _vocabulary(tokenizer: Any) -> Vocabulary:
    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    table = _byte_table(tokenizer)
    if table is not None and _decodes_alike(table, decode, len(tokenizer)):
        return table
    return DecodingVocabulary(decode, lambda token_id: str(tokenizer.convert_ids_to_tokens(token_id)))


def _byte_table(tokenizer: Any) -> ByteVocabulary | None:
    """Of a byte-level tokenizer, the bytes of every token; None for any other kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or json.loads(backend.to_str()).get("decoder", {}).get("type") != "ByteLevel":
        return None
    alphabet = _byte_alphabet()
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    special = set(tokenizer.all_special_ids)
    raws: list[bytes | None] = []
    for token_id, name in enumerate(names):
        plain = all(char in alphabet for char in name)
        raw = bytes(alphabet[char] for char in name) if plain else name.encode()
        raws.append(None if token_id in special else raw)
    return ByteVocabulary(raws, names)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of every byte in byte-level vocabularies (GPT-2): itself, or from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


def _decodes_alike(table: ByteVocabulary, decode: Any, size: int) -> bool:
    """Whether the table says what the tokenizer says, on random runs of tokens (a cut character aside)."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(32):
        ids = torch.randint(0, size, (24,), generator=generator).tolist()
        decoder = table.decoder()
        text, whole = "".join(map(decoder.push, ids)), decode(ids)
        if not whole.startswith(text) or whole[len(text) :].strip("\ufffd"):
            return False
    return True
