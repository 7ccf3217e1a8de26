"""The demo model's shape, and its loss over packed windows."""

from typing import Any

import torch
from torch.nn import functional
from transformers import LlamaConfig

from mico.demo_model.corpus import ANSWER, PROMPT, Windows
from mico.demo_model.tokens import CONTEXT_TOKENS

PROMPT_WEIGHT = 0.2  # of a prompt's tokens in the loss; an answer's weigh 1


def model_config(tokenizer: Any) -> LlamaConfig:
    """Return the configuration: 7.7 million parameters, the embedding shared with the output."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=832,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class Batches:
    """Windows on the device, with the positions that the packing implies."""

    def __init__(self, windows: Windows, device: str) -> None:
        self.tokens = torch.from_numpy(windows.tokens.astype("int64")).to(device)
        self.documents = torch.from_numpy(windows.documents.astype("int64")).to(device)
        scores = torch.from_numpy(windows.scores.astype("int64")).to(device)
        self.answers = (scores == ANSWER).float()
        self.weights = self.answers + PROMPT_WEIGHT * (scores == PROMPT).float()
        self.positions = _positions(self.documents)

    def pick(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return tokens, documents, positions and loss weights, each [rows, context]."""
        return self.tokens[rows], self.documents[rows], self.positions[rows], self.weights[rows]


def _positions(documents: torch.Tensor) -> torch.Tensor:
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def token_losses(
    model: Any, tokens: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the loss of each next token, [rows, context - 1]; a token sees only its own conversation."""
    context = tokens.shape[1]
    causal = torch.ones(context, context, dtype=torch.bool, device=tokens.device).tril()
    visible = causal & (documents[:, None, :, None] == documents[:, None, None, :])
    bias = torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill(
        ~visible, torch.finfo(torch.bfloat16).min
    )
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        output = model(input_ids=tokens, attention_mask=bias, position_ids=positions, use_cache=False)
    logits = output.logits[:, :-1].float()
    losses = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(tokens.shape[0], context - 1)


def batch_loss(
    model: Any, tokens: torch.Tensor, documents: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted mean loss of a batch."""
    weights = weights[:, 1:]
    return (token_losses(model, tokens, documents, positions) * weights).sum() / weights.sum()


def held_out_loss(model: Any, held_out: Batches, batch_windows: int) -> float:
    """Return the mean loss per answer token of the held-out prompts, in nats."""
    model.eval()
    total = torch.zeros((), device=held_out.tokens.device)
    with torch.no_grad():
        for rows in torch.arange(len(held_out.tokens), device=held_out.tokens.device).split(batch_windows):
            tokens, documents, positions, _ = held_out.pick(rows)
            losses = token_losses(model, tokens, documents, positions)
            total += (losses * held_out.answers[rows, 1:]).sum()
    model.train()
    return float(total / held_out.answers[:, 1:].sum())


def add_dropout(model: Any, share: float) -> None:
    """Add dropout to the residual branches of each block; transformers' Llama has none there."""

    def drop(module: Any, _given: Any, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, share, training=module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
