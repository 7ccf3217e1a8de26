"""Run models of the Llama family with few kernels, rounding where the model's own modules round.

A layer has four GEMMs with one kernel between each two: sum and norm, attention with the rotary embedding,
gate. Steps of few rows use the GEMMs of skinny_gemm.py. The pass is certified against the unmodified model at
load. Other families are not supported here and run compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.tensor_split import FAMILIES
from site_engine.cuda import skinny_gemm
from site_engine.cuda.adapters import AdapterArenas
from site_engine.cuda.attention import DeviceContext
from site_engine.cuda.attention_launch import RotaryTable, pdl_kwargs
from site_engine.cuda.compile import TIMED_LAYERS, faster_split
from site_engine.cuda.kernels import layer_kernels, rank_kernels, skinny_gemm_kernels
from site_engine.cuda.own_layers import PARTS, OwnLayers, Part
from site_engine.cuda.rank_sums import INBOX_ROWS, RankSums
from site_engine.cuda.skinny_gemm import Adapters, Versions
from site_engine.model import attention_context
from site_engine.model.attention_context import Scoring
from site_engine.model.loader import LoadedModel
from site_engine.variants.projections import Projection, Size

STATIC_ROPES = ("default", "linear", "llama3", "yarn")
GATE_BLOCK = 1024


class Linear(NamedTuple):
    """A linear layer's weight [columns, depth] and bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight, self.bias)


class Norm(NamedTuple):
    """An RMS norm fused with the residual sum before it. In a group, each rank has a part of that sum."""

    weight: torch.Tensor
    epsilon: float
    ranks: RankSums | None = None

    def embed(
        self, ids: torch.Tensor, embedding: torch.Tensor, versions: Versions | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings of the ids and their norm, using each row's version of the norm's weight."""
        residual = embedding.new_empty(ids.shape[0], embedding.shape[1])
        more = _own(versions, ids)
        return residual, self._launch(layer_kernels.embed_norm, ids, embedding, residual, **more)

    def add(
        self, added: torch.Tensor, residual: torch.Tensor, versions: Versions | None = None
    ) -> torch.Tensor:
        """Add `added` to `residual` in place and return the norm of the sum."""
        if self.ranks is not None:
            if self.ranks.exchanges(added.shape[0]):
                return self.add_parts(added[None], residual, pdl=False)
            self.ranks.group.sum(added)
        return self._launch(layer_kernels.add_norm, added, residual, **_own(versions, added))

    def add_parts(
        self, parts: torch.Tensor, residual: torch.Tensor, versions: Versions | None = None, *, pdl: bool
    ) -> torch.Tensor:
        """Add a product in parts [parts, rows, size] to `residual` in place. Return the norm of the sum."""
        kernel, more = skinny_gemm_kernels.add_parts_norm, _own(versions, parts)
        if self.ranks is not None:
            if self.ranks.exchanges(parts.shape[1]):
                kernel, more = rank_kernels.exchange_parts_norm, self.ranks.arguments
            else:  # a kernel cannot overlap the collective sum
                parts, pdl = self.ranks.group.sum(parts.sum(0, keepdim=True)), False
        return self._launch(
            kernel, parts, residual, part_stride=parts.stride(0),
            PARTS=parts.shape[0], PDL=pdl, **more, **pdl_kwargs(pdl),
        )  # fmt: skip

    def _launch(self, kernel: Any, *given: torch.Tensor, **more: Any) -> torch.Tensor:
        rows, size = given[-1].shape
        out = torch.empty_like(given[-1])
        pad = 1 << (size - 1).bit_length()
        warps = 8 if pad > 2048 else 4
        kernel[(rows,)](
            *given, self.weight, out, self.epsilon, **more, SIZE=size, SIZE_PAD=pad, num_warps=warps
        )
        return out


def _own(versions: Versions | None, some: torch.Tensor) -> dict[str, Any]:
    """Return a norm kernel's arguments for versions of its weight. Without any, `some` is a placeholder."""
    if versions is None:
        return {"own": some, "slots": some, "own_stride": 0, "OWN": False}
    own, slots = versions
    return {"own": own, "slots": slots, "own_stride": own.stride(0), "OWN": True}


class Layer(NamedTuple):
    """The weights of a decoder layer, with projections of the same input joined."""

    before: Norm
    query_key_value: Linear
    scoring: Scoring
    output: Linear
    between: Norm
    gate_up: Linear
    down: Linear


class LlamaForward:
    """A forward pass with the signature of `LoadedModel.forward`, run in the current DeviceContext."""

    def __init__(
        self,
        model: LoadedModel,
        layers: list[Layer],
        last: Norm,
        rotary: RotaryTable,
        split_gate: Callable[[int], bool],
    ) -> None:
        config, body = model.model.config, model.model.model
        self._heads = config.num_attention_heads
        self._kv_heads = model.layers[0].kv_heads
        self._dim = model.layers[0].key_dim
        self._layers = layers
        self._last = last
        self._modules = [
            [[one.get_submodule(name) for name in names] for names in PARTS] for one in body.layers
        ]
        self._rotary = rotary
        self._split_gate = split_gate  # by number of rows: whether gate and up are faster as two GEMMs
        others = [one.bias for layer in layers for one in (layer.output, layer.gate_up, layer.down)]
        biased = any(bias is not None for bias in others)
        self._skinny = skinny_gemm.is_supported(model.device) and not biased
        self._embedding = body.embed_tokens.weight
        self._head = Linear(model.model.lm_head.weight, model.model.lm_head.bias)

    @property
    def weights(self) -> list[torch.Tensor]:
        """All weights, as passed to the kernels."""
        norms = [self._last, *(norm for each in self._layers for norm in (each.before, each.between))]
        parts = [(each.query_key_value, each.output, each.gate_up, each.down) for each in self._layers]
        linears = [self._head, *(linear for each in parts for linear in each)]
        biases = [each.bias for each in linears if each.bias is not None]
        weights = [*(each.weight for each in norms), *(each.weight for each in linears)]
        return [self._embedding, *weights, *biases]

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        step = attention_context.current()
        assert isinstance(step, DeviceContext)
        residual, normed = self._layers[0].before.embed(
            ids[0], self._embedding, _versions(step, 0, Part.NORM_BEFORE)
        )
        most = skinny_gemm.MAX_ROWS if step.adapters is None else skinny_gemm.MAX_ADAPTED_ROWS
        skinny = self._skinny and step.decodes_only and normed.shape[0] <= most
        large = self._layer if step.adapters is None else self._adapted_layer
        run = self._skinny_layer if skinny else large
        for layer, after in zip(self._layers, [*self._layers[1:], None], strict=True):
            normed = run(step, layer, self._last if after is None else after.before, normed, residual)
        return self._head(normed if step.decodes_only else normed[wanted])

    def _layer(
        self, step: DeviceContext, layer: Layer, after: Norm, normed: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        attended = self._attend(step, layer.query_key_value(normed), layer.scoring)
        normed = layer.between.add(layer.output(attended), residual)
        return after.add(layer.down(self._gated(layer, normed)), residual)

    def _skinny_layer(
        self, step: DeviceContext, layer: Layer, after: Norm, normed: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer for few rows. The GEMM kernels also compute the adapters' products."""
        pdl, (weight, bias), number = step.pdl, layer.query_key_value, step.layer

        def adapters(projection: Projection) -> Adapters | None:
            return None if step.adapters is None else step.adapters.product(number, projection)

        joint = skinny_gemm.whole(normed, weight, bias, adapters(Projection.QUERY_KEY_VALUE), pdl=pdl)
        attended = self._attend(step, joint, layer.scoring)
        parts = skinny_gemm.parts(attended, layer.output.weight, adapters(Projection.OUTPUT), pdl=pdl)
        normed = layer.between.add_parts(parts, residual, _versions(step, number, Part.NORM_BETWEEN), pdl=pdl)
        opened = skinny_gemm.gated(normed, layer.gate_up.weight, adapters(Projection.GATE_UP), pdl=pdl)
        parts = skinny_gemm.parts(opened, layer.down.weight, adapters(Projection.DOWN), pdl=pdl)
        return after.add_parts(parts, residual, _versions(step, number + 1, Part.NORM_BEFORE), pdl=pdl)

    def _adapted_layer(
        self, step: DeviceContext, layer: Layer, after: Norm, normed: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer in a step with adapters, adding their products to the joint products."""
        adapters, number, width = step.adapters, step.layer, layer.down.weight.shape[1]
        assert adapters is not None

        def product(projection: Projection, linear: Linear, given: torch.Tensor) -> torch.Tensor:
            versions = _versions(step, number, projection)
            out = linear(given) if versions is None else skinny_gemm.owned(given, *linear, versions)
            return adapters.add(number, projection, given, out)

        joint = product(Projection.QUERY_KEY_VALUE, layer.query_key_value, normed)
        attended = self._attend(step, joint, layer.scoring)
        added = product(Projection.OUTPUT, layer.output, attended)
        normed = layer.between.add(added, residual, _versions(step, number, Part.NORM_BETWEEN))
        both = product(Projection.GATE_UP, layer.gate_up, normed)
        opened = _opened(both[:, :width], both[:, width:])
        added = product(Projection.DOWN, layer.down, opened)
        return after.add(added, residual, _versions(step, number + 1, Part.NORM_BEFORE))

    def arenas(self, slots: int, rank: int) -> AdapterArenas:
        """Allocate memory for adapters of up to `rank` in each of `slots`."""
        layer = self._layers[0]
        attention, narrow = self._heads * self._dim, self._kv_heads * self._dim
        depth, width = layer.output.weight.shape[0], layer.down.weight.shape[1]
        sizes = [
            Size(depth, (attention, narrow, narrow), layer.query_key_value.bias is not None),
            Size(attention, (depth,), layer.output.bias is not None),
            Size(depth, (width, width), layer.gate_up.bias is not None),
            Size(width, (depth,), layer.down.bias is not None),
        ]
        own = None if self._last.ranks is not None else OwnLayers(self._modules, slots)
        return AdapterArenas(sizes, len(self._layers), slots, rank, self._embedding, own)

    def _gated(self, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        rows, width = normed.shape[0], layer.down.weight.shape[1]
        if self._split_gate(rows):
            weight, bias = layer.gate_up
            low, high = (None, None) if bias is None else (bias[:width], bias[width:])
            gate, up = F.linear(normed, weight[:width], low), F.linear(normed, weight[width:], high)
        else:
            both = layer.gate_up(normed)
            gate, up = both[:, :width], both[:, width:]
        return _opened(gate, up)

    def _attend(self, step: DeviceContext, joint: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        tokens, heads = joint.shape[0], self._heads + self._kv_heads
        split = joint.view(tokens, -1, self._dim).transpose(0, 1)
        query, key, value = split[: self._heads], split[self._heads : heads], split[heads:]
        return step.attend(query, key, value, scoring, self._rotary).view(tokens, -1)


def _versions(step: DeviceContext, layer: int, part: int) -> Versions | None:
    """Return the rows' versions of a part of a layer, or None if all rows use the base's."""
    return None if step.adapters is None else step.adapters.versions(layer, part)


def _opened(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    layer_kernels.silu_times[(rows, -(-width // GATE_BLOCK))](
        gate,
        up,
        out,
        width,
        gate.stride(0),
        up.stride(0),
        BLOCK=GATE_BLOCK,
        num_warps=4,
    )
    return out


def llama_forward(model: LoadedModel) -> LlamaForward | None:
    """Return the forward pass for a model of the family, else None.

    The weights of the model's own projections become views of the joint weights.
    """
    config = model.model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if type(model.model).__name__ not in FAMILIES or rope not in STATIC_ROPES or config.hidden_act != "silu":
        return None
    body = model.model.model
    window = config.sliding_window if type(model.model).__name__ == "MistralForCausalLM" else None
    ranks = None
    if model.group is not None:
        rows = INBOX_ROWS if model.device.type == "cuda" else 0  # interpreted, a kernel would deadlock
        ranks = RankSums(model.group, rows, config.hidden_size, model.dtype, model.device)

    def norm(its: Any) -> Norm:
        return Norm(its.weight.detach(), its.variance_epsilon, ranks)

    layers = [_layer(one, window, norm) for one in body.layers]
    split_gate = faster_split([one.gate_up.weight for one in layers[:TIMED_LAYERS]])
    positions = torch.arange(model.context_tokens, device=model.device)[None]
    with torch.no_grad():
        cosines, sines = body.rotary_emb(body.embed_tokens.weight[:1, None], positions)
    rotary = RotaryTable(cosines[0].contiguous(), sines[0].contiguous())
    return LlamaForward(model, layers, norm(body.norm), rotary, split_gate)


def _layer(layer: Any, window: int | None, norm: Callable[[Any], Norm]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        before=norm(layer.input_layernorm),
        query_key_value=_joint(attention.q_proj, attention.k_proj, attention.v_proj),
        scoring=Scoring(attention.scaling, getattr(attention, "sliding_window", window)),
        output=_linear(attention.o_proj),
        between=norm(layer.post_attention_layernorm),
        gate_up=_joint(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(linear: Any) -> Linear:
    return Linear(linear.weight.detach().contiguous(), None if linear.bias is None else linear.bias.detach())


def _joint(*linears: Any) -> Linear:
    """Join linear layers of one input into one. The modules stay usable, with views of the joint weight."""
    weight = torch.cat([one.weight.detach() for one in linears]).contiguous()
    bias = None if linears[0].bias is None else torch.cat([one.bias.detach() for one in linears])
    begin = 0
    for one in linears:
        end = begin + one.out_features
        one.weight.data = weight[begin:end]
        if bias is not None:
            one.bias.data = bias[begin:end]
        begin = end
    return Linear(weight, bias)
