"""A random Llama of a few thousand parameters as a model folder: byte-level tokens and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 512
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Weights so large that greedy answers differ by prompt."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([END, "<|system|>", "<|user|>", "<|assistant|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=END, pad_token=END, chat_template=TEMPLATE
    )
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        model.lm_head.weight[unwritten(tokenizer)] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def unwritten(tokenizer: Any) -> list[int]:
    """Tokens that the model avoids: text of printable ASCII alone has no broken character."""
    wanted = {END, *(chr(code) for code in range(33, 127))}
    return [number for token, number in tokenizer.get_vocab().items() if token not in wanted]
