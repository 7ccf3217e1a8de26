"""Train layers of the Llama family with few kernels: forward, and computed again with the gradients.

The products of the frozen weights are PyTorch's, norms, rotations and gates one kernel each; an adapter's
products are added in place. Of a layer's forward pass, all but the last product is computed again. Autograd
knows attention alone. Does not know other families; they train as transformers computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.tensor_split import FAMILIES
from site_engine.cuda.kernels import layer_kernels, training_kernels
from site_engine.model.attention_context import AttentionContext, Scoring
from site_engine.training.adapter import Factors, exact_product

GATE_BLOCK, LOGIT_BLOCK = 1024, 4096
Gradients = dict[str, tuple[torch.Tensor, torch.Tensor]]


def fits(model: Any) -> bool:
    """Return whether a model of transformers can be trained by this module."""
    return (
        type(model).__name__ in FAMILIES
        and model.config.hidden_act == "silu"
        and all(
            type(each) is torch.nn.Linear
            for layer in model.base_model.layers
            for each in (model.lm_head, *_projections(layer).values())
        )
    )


def _projections(layer: Any) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        **{
            f"self_attn.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        },
        **{f"mlp.{name}": getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")},
    }


# ---- norms


class Norm(NamedTuple):
    """An RMS norm with the sum before it."""

    weight: torch.Tensor
    epsilon: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden)
        self._launch(training_kernels.sum_norm, hidden, hidden, hidden, self.weight, out, ADDED=False)
        return out

    def add(self, hidden: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum and its norm."""
        total, out = torch.empty_like(hidden), torch.empty_like(hidden)
        self._launch(training_kernels.sum_norm, hidden, added, total, self.weight, out, ADDED=True)
        return total, out

    def backward(
        self, hidden: torch.Tensor, gradient: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the gradient of what was normed, in the place of the norm's."""
        past = gradient if beside is None else beside
        kernel = training_kernels.norm_backward
        self._launch(kernel, hidden, self.weight, gradient, past, gradient, BESIDE=beside is not None)
        return gradient

    def _launch(self, kernel: Any, *given: torch.Tensor, **how: bool) -> None:
        rows, size = given[0].shape
        pad = 1 << (size - 1).bit_length()
        warps = 8 if pad > 2048 else 4
        kernel[(rows,)](*given, self.epsilon, **how, SIZE=size, SIZE_PAD=pad, num_warps=warps)


# ---- projections


class Joined:
    """Projections of one input, and what an adapter adds to them."""

    def __init__(self, modules: Mapping[str, Any], factors: Factors, scale: float) -> None:
        self._modules, self._scale = modules, scale
        self._factors = {name: factors[name] for name in modules if name in factors}
        self._version = -1
        self._down: torch.Tensor | None = None  # [all ranks, in], in 16 bits
        self._ups: dict[str, torch.Tensor] = {}  # [out, rank], scaled

    def inner(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the adapter's inner products, None where it changes none of these."""
        self._round(rows.dtype)
        return None if self._down is None else rows @ self._down.T

    def forward(self, rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Map rows [tokens, in]; return each projection's and the adapter's inner products."""
        inner, outs = self.inner(rows), []
        for name, module in self._modules.items():
            out = F.linear(rows, module.weight, module.bias)
            if inner is not None and name in self._ups:
                out.addmm_(inner[:, self._part(name)], self._ups[name].T)
            outs.append(out)
        return outs, inner

    def backward(
        self,
        gradients: Sequence[torch.Tensor],
        rows: torch.Tensor,
        inner: torch.Tensor | None,
        found: Gradients,
    ) -> torch.Tensor:
        """Return the gradient of the rows; put those of the factors into `found`."""
        given: torch.Tensor | None = None
        for gradient, module in zip(gradients, self._modules.values(), strict=True):
            given = gradient @ module.weight if given is None else given.addmm_(gradient, module.weight)
        assert given is not None
        if inner is None or self._down is None:
            return given
        through = torch.empty_like(inner)
        ups = {}
        for gradient, name in zip(gradients, self._modules, strict=True):
            if name in self._ups:
                torch.mm(gradient, self._ups[name], out=through[:, self._part(name)])
                ups[name] = exact_product(gradient.T, inner[:, self._part(name)]).mul_(self._scale)
        downs = exact_product(through.T, rows)
        found.update({name: (downs[self._part(name)], up) for name, up in ups.items()})
        return given.addmm_(through, self._down)

    def _part(self, name: str) -> slice:
        """Return where a module's rank lies among all."""
        before = 0
        for other, (down, _) in self._factors.items():
            if other == name:
                return slice(before, before + down.shape[0])
            before += down.shape[0]
        raise KeyError(name)

    def _round(self, dtype: torch.dtype) -> None:
        """Round the factors if they have changed, as they do with each step of the optimizer."""
        version = sum(factor._version for pair in self._factors.values() for factor in pair)
        if version == self._version or not self._factors:
            return
        self._version = version
        self._down = torch.cat([down.detach() for down, _ in self._factors.values()]).to(dtype)
        self._ups = {name: (up.detach() * self._scale).to(dtype) for name, (_, up) in self._factors.items()}


# ---- a layer


class _Computed(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    normed: torch.Tensor
    inner: torch.Tensor | None
    leaves: list[torch.Tensor]  # queries, keys and values, rotated
    attended: torch.Tensor
    attended_inner: torch.Tensor | None
    between: torch.Tensor
    between_normed: torch.Tensor
    between_inner: torch.Tensor | None
    gate: torch.Tensor
    up: torch.Tensor
    gated: torch.Tensor


class TrainedLayer:
    """A decoder layer with the adapter's factors for it; the names of modules begin with `name`."""

    def __init__(self, name: str, layer: Any, factors: Factors, scale: float) -> None:
        modules = {f"{name}.{each}": module for each, module in _projections(layer).items()}
        joined = [
            Joined({f"{name}.{each}": modules[f"{name}.{each}"] for each in names.split()}, factors, scale)
            for names in (
                "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj mlp.up_proj",
                "mlp.down_proj",
            )
        ]
        self._query_key_value, self._output, self._gate_up, self._down = joined
        self._before, self._between = (
            Norm(norm.weight, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        attention = layer.self_attn
        self._dim = attention.head_dim
        self._scoring = Scoring(attention.scaling, sliding_window(attention))

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], context: AttentionContext
    ) -> torch.Tensor:
        """Map hidden states [tokens, dim]."""
        found = self._compute(hidden, rotary, context, grad=False)
        out: torch.Tensor = self._down.forward(found.gated)[0][0].add_(found.between)
        return out

    def backward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
        gradient: torch.Tensor,
    ) -> tuple[torch.Tensor, Gradients]:
        """Return the gradients of the layer's input and of its factors, by the names of their modules."""
        found = self._compute(hidden, rotary, context, grad=True)
        factors: Gradients = {}
        wanted = self._down.backward([gradient], found.gated, self._down.inner(found.gated), factors)
        rows, width = wanted.shape
        training_kernels.silu_times_backward[(rows, -(-width // GATE_BLOCK))](
            found.gate, found.up, wanted, width, BLOCK=GATE_BLOCK
        )
        del wanted
        normed = self._gate_up.backward(
            [found.gate, found.up], found.between_normed, found.between_inner, factors
        )
        between = self._between.backward(found.between, normed, gradient)
        attended = found.attended.detach().flatten(1)
        wanted = self._output.backward([between], attended, found.attended_inner, factors)
        parts = torch.autograd.grad(found.attended, found.leaves, wanted.view(found.attended.shape))
        parts = tuple(part.contiguous() for part in parts)
        _rotate(parts[0], rotary, -1)
        _rotate(parts[1], rotary, -1)
        flat = [part.flatten(1) for part in parts]
        normed = self._query_key_value.backward(flat, found.normed, found.inner, factors)
        return self._before.backward(hidden, normed, between), factors

    def _compute(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: AttentionContext,
        *,
        grad: bool,
    ) -> _Computed:
        normed = self._before.forward(hidden)
        heads, inner = self._query_key_value.forward(normed)
        leaves = [each.view(each.shape[0], -1, self._dim) for each in heads]
        _rotate(leaves[0], rotary, 1)
        _rotate(leaves[1], rotary, 1)
        leaves = [each.detach().requires_grad_(grad) for each in leaves]
        with torch.set_grad_enabled(grad):
            query, key, value = (each.transpose(0, 1) for each in leaves)
            attended = context.attend(query, key, value, self._scoring)
        (out,), attended_inner = self._output.forward(attended.detach().flatten(1))
        between, between_normed = self._between.add(hidden, out)
        (gate, up), between_inner = self._gate_up.forward(between_normed)
        gated = torch.empty_like(gate)
        rows, width = gate.shape
        layer_kernels.silu_times[(rows, -(-width // GATE_BLOCK))](
            gate, up, gate, gated, width, width, width, MORE=False, BLOCK=GATE_BLOCK
        )
        return _Computed(
            normed, inner, leaves, attended, attended_inner,
            between, between_normed, between_inner, gate, up, gated,
        )  # fmt: skip


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], sign: int) -> None:
    """Rotate heads [tokens, heads, dim] in place; -1: backward."""
    rows, count, dim = heads.shape
    half = dim // 2
    training_kernels.rotate[(rows,)](
        heads, *(each.view(rows, dim) for each in rotary), count,
        SIGN=sign, HEADS_PAD=1 << (count - 1).bit_length(), HALF=half, HALF_PAD=1 << (half - 1).bit_length(),
    )  # fmt: skip


def sliding_window(attention: Any) -> int | None:
    """Return the window that an attention module of these families gives to its attention."""
    if type(attention).__name__.startswith("Mistral"):
        window: int | None = getattr(attention.config, "sliding_window", None)
        return window
    return getattr(attention, "sliding_window", None)


# ---- the head


class TrainedHead:
    """The last norm, the product that gives logits, and the loss."""

    def __init__(self, norm: Any, head: Any) -> None:
        self._norm = Norm(norm.weight, norm.variance_epsilon)
        self._weight, self._bias = head.weight, head.bias

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, count: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Map hidden states [tokens, dim]; return the sum of the losses, how many targets are predicted best
        and, with a `count`, the gradient of the states of the sum divided by it.
        """
        logits = F.linear(self._norm.forward(hidden), self._weight, self._bias)
        rows, vocabulary = logits.shape
        losses, hits = (torch.empty(rows, device=hidden.device) for _ in range(2))
        backward = count is not None
        training_kernels.cross_entropy[(rows,)](
            logits, targets, losses, hits, vocabulary, 1.0 / (count or 1),
            BACKWARD=backward, BLOCK=LOGIT_BLOCK, num_warps=8,
        )  # fmt: skip
        gradient = self._norm.backward(hidden, logits @ self._weight) if backward else None
        return losses.sum(), hits.sum(), gradient
