"""Decode the text of one answer, apply its stop strings and skip the text that was delivered before.

The engine decides which tokens end an answer, not this module.
"""

from __future__ import annotations

from collections.abc import Collection

from site_engine.core.request import Finish, Output, Request
from site_engine.text.detokenize import ShowingDecoder, TextStream, Vocabulary
from site_engine.text.thinking import ThinkingDecoder


def end_tokens(request: Request, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Return the ids of the tokens that end an answer. Their text is not part of the answer."""
    sampling = request.sampling
    return frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else eos_token_ids)


class AnswerText:
    """Convert the tokens of one request to text. `ends`: the request's `end_tokens`."""

    __slots__ = ("_carried", "_ends", "_min_tokens", "_stream", "_thought")

    def __init__(self, request: Request, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        decoder = vocabulary.decoder(request.prompt if request.follows else ())
        if request.shown:
            decoder = ShowingDecoder(decoder, request.shown)
        self._thought: ThinkingDecoder | None = None
        if request.thinking is not None:
            decoder = self._thought = ThinkingDecoder(
                decoder, request.thinking, request.resumed_reasoning_chars
            )
        self._stream = TextStream(decoder, request.sampling.stop, request.resumed_chars)
        self._ends = ends
        self._min_tokens = request.sampling.min_tokens
        self._carried = ""  # undelivered text of resumed tokens

    @property
    def stopped(self) -> str:
        """The stop string that ended the answer. Empty if none was found."""
        return self._stream.stopped

    @property
    def contradicts_delivered(self) -> bool:
        """Whether the delivered text exceeds the text of the resumed tokens: a site that does not separate
        reasoning from text has delivered the reasoning as text.
        """
        return self._thought is not None and self._stream.unsaid_chars > 0

    def read(self, token_id: int, generated: int, finish: Finish | None) -> tuple[str, Finish | None]:
        """Decode a token. Return the new final text and the finish reason, including stop strings.

        `finish`: the reason without stop strings: STOP for an end token or a complete grammar, LENGTH at the
        limit.
        """
        stopped = finish is Finish.STOP
        if stopped and token_id in self._ends:
            return self.flush(), finish
        text = self._stream.push(token_id, stopped or generated >= self._min_tokens)
        if finish is not None and not self._stream.stopped:
            text += self.flush()
        return text, Finish.STOP if self._stream.stopped else finish

    def carry(self, token_id: int, generated: int, finish: Finish | None) -> Finish | None:
        """Decode a token that was generated at another site. `take_carried` returns the text."""
        text, finish = self.read(token_id, generated, finish)
        self._carried += text
        return finish

    def flush(self) -> str:
        """Return all buffered text."""
        return self._stream.flush("" if self._thought is None else self._thought.end())

    def take_carried(self) -> str:
        carried, self._carried = self._carried, ""
        return carried

    def with_thought(self, output: Output) -> Output:
        """Return the output with the reasoning decoded since the last output."""
        if self._thought is None:
            return output
        return output._replace(reasoning=self._thought.take(), reasoning_tokens=self._thought.tokens)
