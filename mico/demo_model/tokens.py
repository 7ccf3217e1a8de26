"""The demo model's byte-level BPE tokenizer and chat template."""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTEXT_TOKENS = 1_024
PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = [
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
]

TOOL_MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
"""Tokens that are text: calls of functions and their results stand between them."""

# Each turn is its role's token, the text, and <|end|>. Functions are shown as signatures, since a JSON schema
# would fill a third of the context; a function's result is a user's turn.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro kind(schema) -%}
{%- if schema['enum'] -%}{{ schema['enum'] | join('|') }}
{%- elif schema['anyOf'] -%}{{ kind(schema['anyOf'][0]) }}
{%- elif schema['type'] == 'array' -%}list of {{ kind(schema['items'] or {}) }}
{%- elif schema['properties'] -%}{{ '{' }}{{ fields(schema) }}{{ '}' }}
{%- elif schema['type'] is string -%}{{ schema['type'] }}
{%- else -%}any
{%- endif -%}
{%- endmacro -%}
{%- macro fields(schema) -%}
{%- for name, field in (schema['properties'] or {}).items() -%}
{{ name }}{{ '' if name in (schema['required'] or []) else '?' }}: {{ kind(field) -}}
{{ '' if loop.last else ', ' }}
{%- endfor -%}
{%- endmacro -%}
{%- if tools -%}
<|system|>Functions:
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{{ '\n' }}{{ function.name }}({{ fields(function.parameters or {}) }})
{{- ' ' + function.description.strip() if function.description else '' }}
{%- endfor -%}
{{ '<|end|>' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
{{ '<|system|>' + text(message.content) + '<|end|>' }}
{%- elif message.role == 'user' -%}
{{ '<|user|>' + text(message.content) + '<|end|>' }}
{%- elif message.role == 'assistant' -%}
{{ '<|assistant|>' + text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{ '\n' if message.content or not loop.first else '' }}<tool_call>
{"name": "{{ function.name }}", "arguments": {{
function.arguments if function.arguments is string else function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{{ '<|end|>' }}
{%- elif message.role == 'tool' -%}
{{ '<|user|><tool_response>\n' + text(message.content) + '\n</tool_response><|end|>' }}
{%- else -%}
{{ raise_exception('the role of a message must be system, developer, user, assistant or tool') }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""

# Words that keep the space before them. All others have the same tokens wherever they stand, with or without
# a space: so an argument in quotes is written with the tokens that it has in the question.
SPACED_WORDS = (
    "a|about|after|all|also|an|and|are|as|at|be|because|been|but|by|can|could|did|do|does|for|from|get|had|has|have"
    "|he|her|his|how|i|if|in|into|is|it|its|just|like|many|may|more|most|my|no|not|of|on|one|or|other|our|out|she"
    "|should|so|some|such|than|that|the|their|them|then|there|these|they|this|to|two|up|use|was|we|were|what|when"
    "|where|which|who|will|with|would|you|your"
)
PIECES = rf" (?:{SPACED_WORDS})(?![\p{{L}}\p{{N}}_])|\p{{L}}+|\p{{N}}|[^\s\p{{L}}\p{{N}}]+|\s"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocabulary` tokens; each digit and byte has a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TOOL_MARKS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in TOOL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
