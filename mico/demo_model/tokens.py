"""The demo model's byte-level BPE tokenizer and chat template."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mico.demo_model.data import Exchange

CONTEXT_TOKENS = 1_024
PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = [
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
]

# Each turn is its role's token, the text, and <|end|>. A tool's result is shown as a user turn in plain text.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
{{ '<|system|>' + text(message.content) + '<|end|>' }}
{%- elif message.role == 'user' -%}
{{ '<|user|>' + text(message.content) + '<|end|>' }}
{%- elif message.role == 'assistant' -%}
{{ '<|assistant|>' + text(message.content) + '<|end|>' }}
{%- elif message.role == 'tool' -%}
{{ '<|user|>Result: ' + text(message.content) + '<|end|>' }}
{%- else -%}
{{ raise_exception('the role of a message must be system, developer, user, assistant or tool') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def train_tokenizer(exchanges: Iterable[Exchange], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocabulary` tokens; each digit and byte has a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for exchange in exchanges for text in (exchange.prompt, exchange.answer))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
