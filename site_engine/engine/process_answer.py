"""Turn the rows of a request that runs in the engine's process into outputs with text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from site_engine.core.request import Finish, Moved, Output, Request, Timings, TokenLogprob
from site_engine.engine.process_messages import Detail, RankedToken
from site_engine.text.answer_text import AnswerText, end_tokens
from site_engine.text.detokenize import Vocabulary


class Answer:
    """The answer to one request. A stop string ends it in this process: the engine must then be notified, and
    tokens that it still computes are dropped.
    """

    __slots__ = (
        "_ends",
        "_first_s",
        "_text",
        "_timings",
        "_vocabulary",
        "ended",
        "fingerprint",
        "request",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        vocabulary: Vocabulary,
        eos_token_ids: Collection[int],
        fingerprint: str = "",
    ) -> None:
        self.request = request
        self.fingerprint = fingerprint  # of the variant that answers
        self.ended = False  # by a stop string in its text
        self.token_ids: list[int] = []  # generated here, without the resumed ones
        self._vocabulary = vocabulary
        self._ends = end_tokens(request, eos_token_ids)
        self._text = AnswerText(request, vocabulary, self._ends)
        self._timings: Timings | None = None  # as of its last start
        self._first_s = 0.0

    @property
    def generated(self) -> int:
        return len(self.request.resumed) + len(self.token_ids)

    def to_move(self) -> Moved:
        """Return the state known in this process, for an engine that continues after another was lost."""
        arrived_s, begun = self.request.arrived_s, self._timings
        if begun is None:
            return Moved(arrived_s, fingerprint=self.fingerprint)
        started_s = arrived_s + begun.queued_s
        first_token_s = started_s + begun.prefill_s
        cached, fingerprint = begun.cached_prompt_tokens, self.fingerprint
        return Moved(arrived_s, started_s, first_token_s, begun.preemptions, cached, fingerprint)

    def replay(self) -> None:
        """Process the tokens generated at another site."""
        least = self.request.sampling.min_tokens
        for at, token_id in enumerate(self.request.resumed, start=1):
            ends = token_id in self._ends and at >= least
            self._text.carry(token_id, at, Finish.STOP if ends else None)
        self.ended = bool(self._text.stopped)

    @property
    def contradicts_delivered(self) -> bool:
        return self._text.contradicts_delivered

    def take(self, token_ids: Sequence[int], now: float) -> Output:
        """Return the output of tokens, none of which ended the answer at the engine."""
        text, finish, count = self._text.take_carried(), None, 0
        before = self.generated
        for count, token_id in enumerate(token_ids, start=1):
            more, finish = self._text.read(token_id, before + count, None)
            text += more
            if finish is not None:
                break
        self.token_ids += token_ids[:count]
        output = Output(
            self.request.id, text, tuple(token_ids[:count]), finish, completion_tokens=before + count
        )
        return self._text.with_thought(output if finish is None else self._ended(output, now))

    def take_detailed(self, token_id: int, detail: Detail, now: float) -> Output:
        """Return the output of a row that has details."""
        if not detail.has_token:
            assert detail.finish is not None, "a row has a token or a finish"
            prompt_logprobs = self._logprobs(detail.prompt_logprobs)
            return self.end(detail.finish, detail.error, detail.timings)._replace(
                prompt_logprobs=prompt_logprobs
            )
        if detail.timings is not None:
            self._first_s = now if self._timings is None else self._first_s
            self._timings = detail.timings
        self.token_ids.append(token_id)
        text, finish = self._text.read(token_id, self.generated, detail.finish)
        output = Output(
            self.request.id,
            self._text.take_carried() + text,
            (token_id,),
            finish,
            detail.error,
            self._logprobs(detail.logprobs),
            self._logprobs(detail.prompt_logprobs),
            detail.timings,
            self.generated,
            stop_sequence="" if finish is None else self._text.stopped,
        )
        by_text = finish is not None and detail.finish is None
        return self._text.with_thought(self._ended(output, now) if by_text else output)

    def end(self, finish: Finish, error: str = "", timings: Timings | None = None) -> Output:
        """Return the output of an answer that ends without another token."""
        output = Output(
            self.request.id, finish=finish, error=error, timings=timings, completion_tokens=self.generated
        )
        if finish not in {Finish.STOP, Finish.LENGTH}:
            return output
        text = self._text.take_carried() + self._text.flush()
        return self._text.with_thought(output._replace(text=text, stop_sequence=self._text.stopped))

    def _ended(self, output: Output, now: float) -> Output:
        """Mark the answer as ended by its text; add the timings and stop string to its last output."""
        self.ended = True
        begun = self._timings
        timings = None
        if begun is not None:
            decode_s = now - self._first_s
            timings = Timings(
                begun.queued_s, begun.prefill_s, decode_s, begun.cached_prompt_tokens, begun.preemptions
            )
        return output._replace(timings=timings, stop_sequence=self._text.stopped)

    def _logprobs(self, ranked: Sequence[RankedToken]) -> tuple[TokenLogprob, ...]:
        name = self._vocabulary.token
        return tuple(
            TokenLogprob(
                *name(each.token_id),
                each.logprob,
                tuple(TokenLogprob(*name(token_id), logprob) for token_id, logprob in each.top),
            )
            for each in ranked
        )
