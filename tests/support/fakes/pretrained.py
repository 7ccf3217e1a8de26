"""A corpus of two kinds of prompts, and small models with random weights in the files of pretrained ones."""

from pathlib import Path

import pandas as pd
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["write", "a", "long", "story", "about", "what", "is", "thing", ".", "?"]
KINDS = {"stories": ("Write a long story about {}.", 300), "questions": ("What is {}?", 8)}
MODELS = {"brief": 1, "wordy": 2}
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<sys>{% endif %}{% for each in messages %}<{{ each.role }}> "
    "{{ each.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def corpus() -> pd.DataFrame:
    """Stories are long, questions short, and one model says twice what the other does."""
    return pd.DataFrame(
        {
            "source": source,
            "prompt_id": f"{source}{index}",
            "prompt": kind.format(f"thing {index}"),
            "model": model,
            "response_tokens": tokens * times + index % 5,
        }
        for source, (kind, tokens) in KINDS.items()
        for index in range(300)
        for model, times in MODELS.items()
    )


def encoder_in(folder: Path) -> Path:
    marks = ["[PAD]", "[unused1]", "[unused2]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*marks, *WORDS, *(f"{mark}{digit}" for mark in ("", "##") for digit in range(10))]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def language_model_in(folder: Path) -> Path:
    """Words and numbers below 300 are tokens; its chat template puts a mark of the system before all else."""
    marks = ["<unk>", "<end>", "<sys>", "<user>", "<assistant>"]
    words = [*marks, *WORDS, "Write", "What", "A", *map(str, range(300))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=marks[2:],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
