"""The text of one answer: what its tokens say, where a stop string ends it, what of it was delivered before.

Does not decide which tokens end an answer; the engine does.
"""

from __future__ import annotations

from collections.abc import Collection

from site_engine.core.request import Finish, Output, Request
from site_engine.text.detokenize import ShowingDecoder, TextStream, Vocabulary
from site_engine.text.thinking import ThinkingDecoder


def end_tokens(request: Request, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Return the tokens that end an answer and have no text in it."""
    sampling = request.sampling
    return frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else eos_token_ids)


class AnswerText:
    """Turns the tokens of one request into text. `ends` are its `end_tokens`."""

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
        self._carried = ""  # text of resumed tokens that was not delivered yet

    @property
    def stopped(self) -> str:
        """The stop string that ended the answer, empty if none has."""
        return self._stream.stopped

    @property
    def contradicts_delivered(self) -> bool:
        """Return whether the client has text that the resumed tokens do not say: a site that does not tell
        thoughts from text delivered the thought as text.
        """
        return self._thought is not None and self._stream.unsaid_chars > 0

    def read(self, token_id: int, generated: int, finish: Finish | None) -> tuple[str, Finish | None]:
        """Return the text that a token settles, and the finish reason with stop strings considered.

        `finish` is the reason without them: STOP for an end token or a complete grammar, LENGTH at the limit.
        """
        stopped = finish is Finish.STOP
        if stopped and token_id in self._ends:
            return self.flush(), finish
        text = self._stream.push(token_id, stopped or generated >= self._min_tokens)
        if finish is not None and not self._stream.stopped:
            text += self.flush()
        return text, Finish.STOP if self._stream.stopped else finish

    def carry(self, token_id: int, generated: int, finish: Finish | None) -> Finish | None:
        """Read a token that was generated at another site; `take_carried` returns the text."""
        text, finish = self.read(token_id, generated, finish)
        self._carried += text
        return finish

    def flush(self) -> str:
        """Return all text held back."""
        return self._stream.flush("" if self._thought is None else self._thought.end())

    def take_carried(self) -> str:
        carried, self._carried = self._carried, ""
        return carried

    def with_thought(self, output: Output) -> Output:
        """Add what was thought since the last output."""
        if self._thought is None:
            return output
        return output._replace(reasoning=self._thought.take(), reasoning_tokens=self._thought.tokens)
