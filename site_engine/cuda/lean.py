"""Forward passes of the Llama family with the fewest kernels: the same weights, in the same order, rounded alike.

Four products a layer, and between them one kernel each: sum and norm, attention with the rotary embedding,
gate. Does not know other families; they run compiled. Certified against the unmodified model at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine import context
from site_engine.attention.triton_launch import Turn
from site_engine.context import Scoring
from site_engine.cuda import kernels
from site_engine.cuda.attention import DeviceContext
from site_engine.hf_bridge import LoadedModel

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
GATE_BLOCK = 1024


class Product(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


class Norm(NamedTuple):
    weight: torch.Tensor
    epsilon: float

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._launch(hidden, hidden, add=False)

    def add(self, added: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual` grows by `added`; the norm of the sum."""
        return self._launch(added, residual, add=True)

    def _launch(self, added: torch.Tensor, residual: torch.Tensor, *, add: bool) -> torch.Tensor:
        rows, size = residual.shape
        out = torch.empty_like(residual)
        pad = 1 << (size - 1).bit_length()
        kernels.add_norm[(rows,)](
            added, residual, self.weight, out, self.epsilon,
            SIZE=size, SIZE_PAD=pad, ADD=add, num_warps=8 if pad > 2048 else 4,
        )  # fmt: skip
        return out


class Layer(NamedTuple):
    before: Norm
    query_key_value: Product
    scoring: Scoring
    output: Product
    between: Norm
    gate: Product  # gate and up together if `up` is None
    up: Product | None
    down: Product


class LeanForward:
    """(ids, positions, wanted) -> logits, in the current DeviceContext; as `LoadedModel.forward`."""

    def __init__(
        self, model: LoadedModel, layers: list[Layer], turn: Turn, *, read_ahead: bool = True
    ) -> None:
        config, body = model.model.config, model.model.model
        self._heads = config.num_attention_heads
        self._kv_heads = model.layers[0].kv_heads
        self._dim = model.layers[0].key_dim
        self._layers = layers
        self._turn = turn
        self._embedding = body.embed_tokens.weight
        self._last = _norm(body.norm)
        self._head = Product(model.model.lm_head.weight, model.model.lm_head.bias)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        step = context.current()
        assert isinstance(step, DeviceContext)
        residual = F.embedding(ids[0], self._embedding)
        normed = self._layers[0].before.first(residual)
        for layer, after in zip(self._layers, [*self._layers[1:], None], strict=True):
            joint = layer.query_key_value(normed)
            attended = self._attend(step, joint, layer.scoring)
            normed = layer.between.add(layer.output(attended), residual)
            down = layer.down(_gated(layer, normed))
            normed = (self._last if after is None else after.before).add(down, residual)
        return self._head(normed if step.decodes_only else normed[wanted])

    def _attend(self, step: DeviceContext, joint: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        tokens, heads = joint.shape[0], self._heads + self._kv_heads
        split = joint.view(tokens, -1, self._dim).transpose(0, 1)
        query, key, value = split[: self._heads], split[self._heads : heads], split[heads:]
        return step.attend(query, key, value, scoring, self._turn).view(tokens, -1)


def _gated(layer: Layer, normed: torch.Tensor) -> torch.Tensor:
    gate = layer.gate(normed)
    width = layer.down.weight.shape[1]
    up = gate[:, width:] if layer.up is None else layer.up(normed)
    out = torch.empty(gate.shape[0], width, dtype=gate.dtype, device=gate.device)
    kernels.silu_times[(gate.shape[0], -(-width // GATE_BLOCK))](
        gate, up, out, width, gate.stride(0), up.stride(0), BLOCK=GATE_BLOCK, num_warps=4
    )
    return out


def lean_forward(
    model: LoadedModel, join_gate: Callable[[torch.Tensor, torch.Tensor], bool]
) -> LeanForward | None:
    """For a model of the family, or None. The model's own projections become views of the joint ones."""
    config = model.model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if type(model.model).__name__ not in FAMILIES or rope not in STATIC_ROPES or config.hidden_act != "silu":
        return None
    body = model.model.model
    first = body.layers[0].mlp
    joined = join_gate(first.gate_proj.weight, first.up_proj.weight)
    window = config.sliding_window if type(model.model).__name__ == "MistralForCausalLM" else None
    layers = [_layer(one, window, join_gate=joined) for one in body.layers]
    places = torch.arange(model.context_tokens, device=model.device)[None]
    with torch.no_grad():
        cosines, sines = body.rotary_emb(body.embed_tokens.weight[:1, None], places)
    return LeanForward(model, layers, Turn(cosines[0].contiguous(), sines[0].contiguous()))


def _layer(layer: Any, window: int | None, *, join_gate: bool) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    gate = _joint(mlp.gate_proj, mlp.up_proj) if join_gate else _product(mlp.gate_proj)
    return Layer(
        before=_norm(layer.input_layernorm),
        query_key_value=_joint(attention.q_proj, attention.k_proj, attention.v_proj),
        scoring=Scoring(attention.scaling, getattr(attention, "sliding_window", window)),
        output=_product(attention.o_proj),
        between=_norm(layer.post_attention_layernorm),
        gate=gate,
        up=None if join_gate else _product(mlp.up_proj),
        down=_product(mlp.down_proj),
    )


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), norm.variance_epsilon)


def _product(linear: Any) -> Product:
    return Product(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _joint(*linears: Any) -> Product:
    """One product for all; the modules keep working, on views of it."""
    weight = torch.cat([one.weight.detach() for one in linears])
    bias = None if linears[0].bias is None else torch.cat([one.bias.detach() for one in linears])
    begin = 0
    for one in linears:
        end = begin + one.out_features
        one.weight.data = weight[begin:end]
        if bias is not None:
            one.bias.data = bias[begin:end]
        begin = end
    return Product(weight, bias)
