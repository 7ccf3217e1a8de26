"""Grammars of answers over a model's tokens: compiled once, followed token by token.

Uses llguidance, one small wheel that needs no other package and makes no table of states beforehand.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from site_engine.errors import NotServed, Reason

MAX_CACHED = 256
MAX_SOURCE_CHARS = 1 << 18
MAX_SYMBOLS = 20_000
"""Size limit of a compiled grammar: 2,000 optional properties pass. The time to compile rises with their
square: with this limit half a second, without one 8,000 took 12.5 s.
"""
_CHAR = r'[^"\\\x00-\x1F\x7F]'
_LENGTHS = (6, 8, 10, 12, 15, 20, 30)
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_CHAR}{{1,{most}}}" for most in _LENGTHS), f"{_CHAR}+"]
"""Sets of tokens that llguidance allows as a whole wherever a string has room for the longest of them; it
tries each token of the other sets. With its own lengths, 10 and 30, strings near their `maxLength` take
longer (bench/results/guided.md).
"""
_EXCERPT = re.compile(r"\n( *\d+ \||<state>)")
"""Begins the lines of the grammar that llguidance shows behind an error in it; they are of this module."""
_TRIAL = '{"a": [1, -2.5e3, true, null], "é": "日本 \\n 👩‍🚀"}'


class GrammarsUnavailable(Exception):
    """Answers of this model can't be held to a grammar; the message gives the reason."""


class Guide:
    """The position of one answer in its grammar."""

    __slots__ = ("matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def take(self, token_id: int) -> bool:
        """Go on by a token; return False if the grammar does not have it here."""
        return self.matcher.consume_token(token_id)

    @property
    def ended(self) -> bool:
        """True if the grammar is satisfied and nothing can follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        return self.matcher.get_error().partition("\n")[0]  # what follows shows the schema


class Grammar:
    """A compiled grammar. Every answer that follows it starts a guide of its own."""

    def __init__(self, matcher: LLMatcher, source: str) -> None:
        self.source = source
        self._matcher = matcher

    def start(self) -> Guide:
        return Guide(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one model, and caches them.

    `compile` may be called from any thread and takes from a millisecond to half a second.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Read the tokenizer's vocabulary. Raises GrammarsUnavailable."""
        known = [*eos_token_ids, getattr(tokenizer, "eos_token_id", None)]
        ends = list(dict.fromkeys(each for each in known if each is not None))
        if not ends:
            raise GrammarsUnavailable("the model has no token that ends an answer")
        try:
            self._tokens = _read_tokens(tokenizer, vocab_size, ends)
        except Exception as exc:
            raise GrammarsUnavailable(
                f"its tokenizer is of a kind that llguidance does not read: {exc}"
            ) from exc
        self._cached: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._check_round_trip(tokenizer)

    def compile(self, source: str, param: str) -> Grammar:
        """Compile `source`, in llguidance's dialect of Lark. Raises NotServed that names `param`."""
        with self._lock:
            if source in self._cached:
                self._cached.move_to_end(source)
                return self._cached[source]
        grammar = Grammar(self._matcher(source, param), source)
        with self._lock:
            self._cached[source] = grammar
            if len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
        return grammar

    def literal(self, text: str) -> str:
        """Return text as a grammar must name it: by its token, if the model has a special one for it."""
        ids = self._tokens.tokenize_str(text, parse_special=True)
        if len(ids) == 1 and self._tokens.is_special_token(ids[0]):
            return f"<[{ids[0]}]>"
        return quoted(text)

    def _matcher(self, source: str, param: str) -> LLMatcher:
        if len(source) > MAX_SOURCE_CHARS:
            raise NotServed(Reason.INVALID, f"the schema is longer than {MAX_SOURCE_CHARS} characters", param)
        limits = LLParserLimits(max_grammar_size=MAX_SYMBOLS)
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(source), log_level=0, limits=limits)
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()  # some are found too large, or without any answer, by the first token
        if trial.is_error():
            raise to_refusal(trial.get_error(), param)
        return matcher

    def _check_round_trip(self, tokenizer: Any) -> None:
        """Check that a grammar reads the tokens that the tokenizer writes. Raises GrammarsUnavailable."""
        guide = self.compile("start: %json {}", "").start()
        ids = tokenizer.encode(_TRIAL, add_special_tokens=False)
        if not all(guide.take(token_id) for token_id in ids) or not guide.matcher.is_accepting():
            raise GrammarsUnavailable(
                "its tokenizer writes JSON that a grammar over its tokens does not read"
            )


def _read_tokens(tokenizer: Any, vocab_size: int, ends: list[int]) -> LLTokenizer:
    """Read the tokens of a tokenizer. No other thread runs meanwhile: 1.4 s for 150,000 tokens.

    llguidance copies the tokenizer first, half a second more, to take off the limits that few have.
    """
    backend = tokenizer.backend_tokenizer
    if backend.padding or backend.truncation:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends, slices=SLICES)
    return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=ends, slices=SLICES)


def quoted(text: str) -> str:
    """Return text as a string literal of Lark."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'


def to_refusal(error: str, param: str) -> NotServed:
    """Translate an error: another engine may implement the schema, but a wrong one is wrong everywhere."""
    reason = Reason.UNSUPPORTED if "nimplemented" in error else Reason.INVALID
    message = _EXCERPT.split(error, maxsplit=1)[0]
    message = message.rpartition("compile JSON schema: ")[2]
    detail = "no answer satisfies it" if "NoExtension" in message else " ".join(message.split())[:300]
    return NotServed(reason, f"the schema can't be enforced: {detail}", param)
