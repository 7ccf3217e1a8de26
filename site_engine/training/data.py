"""Encode rows of a training file as token ids with a mask of learned tokens, using the model's chat template.

A prompt is encoded as it is when the model serves it, followed by the answer. The learned tokens are those
that the model has to generate: the answer's text and its end token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from site_engine.core.loader_turns import pause
from site_engine.text.prompt_encoder import PromptEncoder
from site_engine.text.template_arguments import shielded
from site_engine.text.tool_format import HARMONY, chat_template, recognize
from wire.training_rows import MAX_FAULTS, BadRow, Fault, Row, read_row


class Example(NamedTuple):
    """Token ids [tokens] of one sequence and a mask [tokens] of the learned ones. The first never is."""

    ids: np.ndarray
    learned: np.ndarray


class Dataset(NamedTuple):
    """The examples of a file in file order, and the faults found while reading and encoding it."""

    examples: tuple[Example, ...]
    faults: tuple[Fault, ...] = ()


class Answer(NamedTuple):
    """The token ids of an answer as rendered by the template, of which the first `learned` are learned.

    `ended`: the template writes an end token, the last learned token.
    """

    ids: list[int]
    learned: int
    ended: bool


class RowEncoder:
    """Encode rows with a model's tokenizer and template, as examples of at most `context_tokens` tokens."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        own_end = getattr(tokenizer, "eos_token_id", None)
        self._ends = (*eos_token_ids, *(() if own_end is None else (own_end,)))
        self._context_tokens = context_tokens
        self._form, self._no_tools = recognize(chat_template(tokenizer))

    def dataset(self, lines: Iterable[bytes]) -> Dataset:
        """Encode all lines of a file, or those up to the MAX_FAULTS-th fault."""
        examples, faults = list[Example](), list[Fault]()
        for number, line in enumerate(lines, 1):
            pause()
            try:
                examples += self.examples(read_row(line))
            except BadRow as bad:
                faults.append(Fault(number, str(bad)))
                if len(faults) == MAX_FAULTS:
                    break
        if not examples and not faults:
            faults.append(Fault(0, "the file has no lines"))
        return Dataset(tuple(examples), tuple(faults))

    def examples(self, row: Row) -> list[Example]:
        """Return one example, or one per learned message if the template rewrites earlier messages.

        Raises BadRow.
        """
        if not row.messages:
            prompt = self._encoder.encode(row.prompt, special=True)
            return [self._example([(prompt, 0), self._closed(self._answer(row.completion))])]
        if row.tools and (self._form is None or self._form is HARMONY):
            raise BadRow(self._no_tools or "calls in the format of gpt-oss can't be learned here")
        spans = [self._span(row, number) for number in row.learned]
        answers = [self._answer(through[len(prefix) :]) for prefix, through in spans]
        joins = all(
            answer.ended and later.startswith(through)
            for answer, (_, through), (later, _) in zip(answers, spans, spans[1:], strict=False)
        )
        if not joins:
            return [
                self._example([(self._encoder.encode(prefix, special=False), 0), self._closed(answer)])
                for (prefix, _), answer in zip(spans, answers, strict=True)
            ]
        parts, at = list[tuple[list[int], int]](), 0
        for (prefix, through), answer in zip(spans, answers, strict=True):
            parts += [(self._encoder.encode(prefix[at:], special=False), 0), answer[:2]]
            at = len(through)
        return [self._example([*parts[:-1], self._closed(answers[-1])])]

    def _span(self, row: Row, number: int) -> tuple[str, str]:
        """Return the text before an answer, as rendered for serving, and the text up to the answer's end."""
        before = self._render(row, row.messages[:number], True) if number else ""
        through = self._render(row, row.messages[: number + 1], False)
        if not through.startswith(before):
            raise BadRow(f"messages[{number}]: the model's chat template does not answer where prompts end")
        return before, through

    def _render(self, row: Row, messages: Sequence[dict[str, Any]], prompt: bool) -> str:
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise BadRow("the model has no chat template: use 'prompt' and 'completion'")
        shield = self._encoder.shield
        tools = {"tools": [shielded(tool, shield) for tool in row.tools]} if row.tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [shielded(message, shield) for message in messages],
                    tokenize=False,
                    add_generation_prompt=prompt,
                    **tools,
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise BadRow(f"the model's chat template refuses it: {error}") from error

    def _answer(self, text: str) -> Answer:
        ids = self._encoder.encode(text, special=False)
        ends = [place for place, token in enumerate(ids) if token in self._ends]
        return Answer(ids, ends[0] + 1 if ends else len(ids), bool(ends))

    def _closed(self, answer: Answer) -> tuple[list[int], int]:
        """Return the ids of an example's last answer, including an end token if the model has one, and their
        number.
        """
        ids = answer.ids[: answer.learned]
        ids += [] if answer.ended else list(self._ends[:1])
        return ids, len(ids)

    def _example(self, parts: Sequence[tuple[list[int], int]]) -> Example:
        """Join parts, each a list of ids and the number of its leading ids that are learned."""
        ids = np.array([token for part, _ in parts for token in part], dtype=np.int64)
        learned = np.concatenate([np.arange(len(part)) < count for part, count in parts])
        if len(ids) > self._context_tokens:
            raise BadRow(f"has {len(ids):,} tokens, and the model reads {self._context_tokens:,} at most")
        learned[:1] = False  # nothing predicts the first token
        if not learned.any():
            raise BadRow("nothing of it is learned: it has no token that another one predicts")
        return Example(ids, learned)
