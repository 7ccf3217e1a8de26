"""The neural models: a large text encoder as a teacher, and a small one, the student, for serving.

Both encode word pieces `[prompts, pieces]` as a representation `[prompts, width]`. A head maps it, the side
features and the served model to logits over length ranges. Requires torch. Used in training only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from predictor.training.length_head import HeadConfig, LengthHead
from predictor.wordpiece import MAX_PIECES, PAD_MULTIPLE


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of an attention over states of `width`. `attention` is the total width of its heads."""

    width: int
    attention: int
    heads: int


class Attention(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Multi-head attention of queries `[prompts, n, width]` over a memory `[prompts, m, width]`."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.attention)
        self.key = nn.Linear(config.width, config.attention)
        self.value = nn.Linear(config.width, config.attention)
        self.out = nn.Linear(config.attention, config.width)

    def forward(self, queries: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return the attended states. `mask` `[prompts, m]` is true where the memory is not padding."""
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query(queries), self.key(memory), self.value(memory))
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[:, None, None, :]
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class PreNormLayer(nn.Module):  # type: ignore[misc]
    """A transformer layer: attention and a hidden layer, each pre-normalised and with a residual."""

    def __init__(self, config: AttentionConfig, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.hidden_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)

    def forward(self, state: Tensor, memory: Tensor | None, mask: Tensor) -> Tensor:
        """Return new states. Attends over `memory`, or over the states if it is None."""
        queries = self.attention_norm(state)
        state = state + self.attention(queries, queries if memory is None else memory, mask)
        hidden: Tensor = state + self.down(torch.relu(self.up(self.hidden_norm(state))))
        return hidden


class TeacherEncoder(nn.Module):  # type: ignore[misc]
    """A pretrained encoder from a folder or the Hub, mean-pooled over all pieces except padding."""

    def __init__(self, source: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(source, dtype=torch.float32)
        self.width = int(self.encoder.config.hidden_size)

    def forward(self, pieces: Tensor) -> Tensor:
        mask = (pieces != 0).long()
        states = self.encoder(input_ids=pieces, attention_mask=mask).last_hidden_state
        pooled: Tensor = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return pooled


class LengthNet(nn.Module):  # type: ignore[misc]
    """A text encoder with a length head."""

    def __init__(self, body: nn.Module, head: HeadConfig, side: Tensor, models: int, ranges: int) -> None:
        """Create the head, and set its standardisation from side features `side` `[prompts, features]`."""
        super().__init__()
        self.body = body
        self.head = LengthHead(head, body.width + side.shape[1], models, ranges)
        self.head.mean[body.width :] = side.mean(0)
        self.head.scale[body.width :] = 1.0 / side.std(0).clamp_min(0.02)

    def forward(self, pieces: Tensor, side: Tensor, owner: Tensor, model: Tensor) -> Tensor:
        """Return logits `[rows, ranges]`. Row i has the prompt `owner[i]` and the model `model[i]`."""
        return self.predict(self.encode(pieces), side, owner, model)

    def encode(self, pieces: Tensor) -> Tensor:
        """Return the output of the encoder in float32 `[prompts, width]`."""
        with torch.autocast(pieces.device.type, torch.bfloat16, enabled=pieces.is_cuda):
            encoded: Tensor = self.body(pieces)
        return encoded.float()

    def predict(self, encoded: Tensor, side: Tensor, owner: Tensor, model: Tensor) -> Tensor:
        """Return logits `[rows, ranges]` from encoded prompts."""
        logits: Tensor = self.head(torch.cat([encoded, side], 1)[owner], model)
        return logits


def prune_embeddings(encoder: nn.Module, kept: Sequence[int]) -> None:
    """Keep only the rows of the `kept` pieces in the embedding table of an encoder."""
    table = encoder.embeddings.word_embeddings.weight.detach()
    encoder.embeddings.word_embeddings = nn.Embedding.from_pretrained(table[torch.as_tensor(kept)])


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The heads and neurons kept of a teacher's layer. Before it, `merged` neighbours become one state.

    If the first layer merges, position embeddings are per group of pieces instead of per piece.
    """

    heads: int
    hidden: int
    merged: int = 1


@dataclass(frozen=True, slots=True)
class TrimmedConfig:
    """The part of a teacher that a student keeps: the strongest heads and neurons of the first layers."""

    layers: tuple[LayerConfig, ...] = (LayerConfig(6, 768, merged=4), LayerConfig(6, 768))
    queries: int = 4
    query_attention: int = 192
    query_heads: int = 6
    query_hidden: int = 1024


class TrimmedLayer(nn.Module):  # type: ignore[misc]
    """A BERT layer: attention and a hidden layer, each with a residual and post-normalised."""

    def __init__(self, attention: AttentionConfig, config: LayerConfig) -> None:
        super().__init__()
        width = attention.width
        self.merged = config.merged
        if config.merged > 1:
            self.merge = _merge_layer(config.merged, width)
        self.attention = Attention(attention)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.hidden)
        self.down = nn.Linear(config.hidden, width)
        self.hidden_norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return new states and their mask, which is true where they are not padding."""
        if self.merged > 1:
            state, mask = _merge_neighbours(self.merge, state, mask, self.merged)
        state = self.attention_norm(state + self.attention(state, state, mask))
        hidden = self.down(functional.gelu(self.up(state), approximate="tanh"))
        normed: Tensor = self.hidden_norm(state + hidden)
        return normed, mask


class TrimmedEncoder(nn.Module):  # type: ignore[misc]
    """The trimmed first layers of a teacher, and a layer of learned queries that attend over their states."""

    def __init__(self, config: TrimmedConfig, teacher: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.table, self.positions, self.embedding_norm = _copy_embeddings(teacher.embeddings)
        self.together = config.layers[0].merged
        layers = config.layers
        if self.together > 1:
            self.merge = _merge_layer(self.together, self.table.shape[1])
            self.table = nn.Parameter(self.embedding_norm(self.table + self.positions.mean(0)).detach())
            self.positions = nn.Parameter(torch.zeros(MAX_PIECES // self.together, self.table.shape[1]))
            layers = (replace(layers[0], merged=1), *layers[1:])
        self.layers = nn.ModuleList(map(_trim_layer, teacher.encoder.layer, layers))
        attention = AttentionConfig(self.table.shape[1], config.query_attention, config.query_heads)
        self.memory_norm = nn.LayerNorm(self.table.shape[1])
        self.queries = nn.Parameter(torch.randn(config.queries, self.table.shape[1]) * 0.5)
        self.reader = PreNormLayer(attention, config.query_hidden)
        self.width = config.queries * self.table.shape[1]

    def forward(self, pieces: Tensor) -> Tensor:
        pieces = functional.pad(pieces, (0, -pieces.shape[1] % PAD_MULTIPLE))
        state, mask = functional.embedding(pieces, self.table), pieces != 0
        if self.together > 1:
            state, mask = _merge_neighbours(self.merge, state, mask, self.together)
        state = self.embedding_norm(state + self.positions[: state.shape[1]])
        for layer in self.layers:
            state, mask = layer(state, mask)
        queries = self.queries.expand(len(pieces), -1, -1)
        readout: Tensor = self.reader(queries, self.memory_norm(state), mask)
        return readout.flatten(1)


def _copy_embeddings(embeddings: nn.Module) -> tuple[nn.Parameter, nn.Parameter, nn.LayerNorm]:
    """Return the piece embeddings, position embeddings, and normalisation of their sum of a teacher."""
    table = embeddings.word_embeddings.weight.detach().float().clone()
    positions = embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
    norm = _copy_norm(nn.LayerNorm(table.shape[1]), embeddings.LayerNorm)
    return nn.Parameter(table), nn.Parameter(positions[:MAX_PIECES].detach().float().clone()), norm


def _merge_neighbours(merge: nn.Linear, state: Tensor, mask: Tensor, together: int) -> tuple[Tensor, Tensor]:
    """Return the merged states of groups of neighbours, and the mask of groups not entirely padding."""
    groups = (state * mask[..., None]).unflatten(1, (-1, together))
    return merge(groups.flatten(2)), mask.unflatten(1, (-1, together)).any(2)


def _merge_layer(together: int, width: int) -> nn.Linear:
    """Return a layer that merges neighbours. It is initialised as their mean plus noise."""
    merge = nn.Linear(together * width, width, bias=False)
    mean = torch.cat([torch.eye(width) / together] * together, 1)
    merge.weight.data = mean + 0.01 * torch.randn_like(mean)
    return merge


def _trim_layer(layer: nn.Module, config: LayerConfig) -> TrimmedLayer:
    """Return a teacher's layer with its strongest heads and neurons, by the norms of their weights."""
    attention, up, down = layer.attention, layer.intermediate.dense, layer.output.dense
    head_width = attention.self.query.out_features // attention.self.num_attention_heads
    strength = attention.self.value.weight.norm(dim=1) * attention.output.dense.weight.norm(dim=0)
    heads = strength.unflatten(0, (-1, head_width)).sum(1).topk(config.heads).indices.sort().values
    columns = (heads[:, None] * head_width + torch.arange(head_width)).flatten()
    neurons = (up.weight.norm(dim=1) * down.weight.norm(dim=0)).topk(config.hidden).indices.sort().values
    width = down.out_features
    trimmed: TrimmedLayer = TrimmedLayer(AttentionConfig(width, len(columns), config.heads), config)
    for name in ("query", "key", "value"):
        _copy_linear(getattr(trimmed.attention, name), getattr(attention.self, name), rows=columns)
    _copy_linear(trimmed.attention.out, attention.output.dense, columns=columns)
    _copy_linear(trimmed.up, up, rows=neurons)
    _copy_linear(trimmed.down, down, columns=neurons)
    _copy_norm(trimmed.attention_norm, attention.output.LayerNorm)
    _copy_norm(trimmed.hidden_norm, layer.output.LayerNorm)
    return trimmed


def _copy_linear(
    to: nn.Linear, source: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None
) -> None:
    """Copy the selected outputs (rows) or inputs (columns) of a linear layer."""
    with torch.no_grad():
        weight, bias = source.weight, source.bias
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        to.weight.copy_(weight if columns is None else weight[:, columns])
        to.bias.copy_(bias)


def _copy_norm(to: nn.LayerNorm, source: nn.LayerNorm) -> nn.LayerNorm:
    to.load_state_dict(source.state_dict())
    to.eps = source.eps
    return to
