"""Turn the tokens of a request into outputs: text, finish reason, log probabilities, timings."""

from __future__ import annotations

from collections.abc import Collection

import torch

from site_engine.core.request import Finish, Output, Request, Timings, TokenLogprob
from site_engine.model.sampler import Alternatives, rank
from site_engine.text.answer_text import AnswerText, end_tokens
from site_engine.text.detokenize import NoText, Vocabulary


class OutputProcessor:
    """Turns the tokens of one request into outputs."""

    __slots__ = (
        "_answer",
        "_has_no_text",
        "_min_tokens",
        "_prompt_logprobs",
        "_starts_timed",
        "_vocabulary",
        "request",
    )

    def __init__(self, request: Request, vocabulary: Vocabulary, eos_token_ids: Collection[int]) -> None:
        self.request = request
        self._vocabulary = vocabulary
        request.ends = end_tokens(request, eos_token_ids)
        self._answer = AnswerText(request, vocabulary, request.ends)
        self._has_no_text = isinstance(vocabulary, NoText) and request.thinking is None
        self._min_tokens = request.sampling.min_tokens
        first = request.prompt[:1] if request.sampling.prompt_logprobs else ()  # has no log probability
        self._prompt_logprobs = [self._logprob(token_id, None) for token_id in first]
        self._starts_timed = 0  # starts of the request whose timings were sent

    def replay(self) -> Finish | None:
        """Process the tokens generated at another site; return the finish reason if they end the response."""
        finish, guide = None, self.request.guide
        for at, token_id in enumerate(self.request.resumed, start=1):
            if guide is not None:
                guide.take(token_id)
            finish = self._answer.carry(token_id, at, self._finish(token_id, at))
        return finish

    @property
    def contradicts_delivered(self) -> bool:
        return self._answer.contradicts_delivered

    def take(self, token_id: int, now: float, alternatives: Alternatives | None) -> Output:
        """Append a token, which the grammar has taken, and return its output."""
        request, answer = self.request, self._answer
        if request.first_token_s is None:
            request.first_token_s = now
        if request.max_tokens == 0:  # only the prompt is evaluated
            return self.end(Finish.LENGTH, now)
        tokens = request.tokens
        tokens.append(token_id)
        generated = len(tokens) - request.prompt_len
        finish = self._finish(token_id, generated)
        is_timed = finish is None and self._starts_timed > request.preemptions
        text, finish = answer.read(token_id, generated, finish)
        ended = finish is Finish.STOP and token_id in request.ends
        is_timed = finish is None and is_timed
        self._starts_timed = request.preemptions + 1
        request.alone_until = request.max_tokens if self._has_no_text else 0
        output = Output(
            request.id,
            answer.take_carried() + text,
            (token_id,),
            finish,
            "",
            () if alternatives is None or ended else (self._logprob(token_id, alternatives),),
            self._take_prompt_logprobs() if self._prompt_logprobs else (),
            None if is_timed else self._timings(now),
            generated,
        )
        if finish is not None and answer.stopped:
            output = output._replace(stop_sequence=answer.stopped)
        return answer.with_thought(output)

    def end(self, finish: Finish, now: float, error: str = "") -> Output:
        """Return the output of a response that ends without another token."""
        complete = finish in {Finish.STOP, Finish.LENGTH}
        output = Output(
            self.request.id,
            text=self._answer.take_carried() if complete else "",
            finish=finish,
            error=error,
            prompt_logprobs=self._take_prompt_logprobs() if complete else (),
            timings=self._timings(now),
            completion_tokens=self.request.generated,
            stop_sequence=self._answer.stopped if complete else "",
        )
        return self._answer.with_thought(output) if complete else output

    def read_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Record the prompt's log probabilities from logits [positions, vocabulary], from `start` on."""
        request = self.request
        if self._starts_timed:
            return  # recomputed after a preemption: the log probabilities were sent with the first token
        done = len(self._prompt_logprobs)  # known already if the prompt is recomputed after a preemption
        chosen = request.tokens[start + 1 : min(start + 1 + logits.shape[0], request.prompt_len)]
        wanted = [request.sampling.logprobs or 0] * len(chosen)
        ranked = rank(torch.log_softmax(logits[: len(chosen)].float(), dim=-1), chosen, wanted)
        first = start + 1 - request.virtual_tokens
        for position, (token_id, one) in enumerate(zip(chosen, ranked, strict=True), start=first):
            if position >= done:
                self._prompt_logprobs.append(self._logprob(token_id, one))

    def _finish(self, token_id: int, generated: int) -> Finish | None:
        """Return the finish reason if a token ends the response: by grammar, end token or token limit."""
        guide = self.request.guide
        if guide is not None and guide.ended:
            return Finish.STOP  # a completed grammar needs no end-of-sequence token
        if token_id in self.request.ends and generated >= self._min_tokens:
            return Finish.STOP
        return Finish.LENGTH if generated >= self.request.max_tokens else None

    def _logprob(self, token_id: int, found: Alternatives | None) -> TokenLogprob:
        text, raw = self._vocabulary.token(token_id)
        if found is None:
            return TokenLogprob(text, raw, None)
        best = zip(found.token_ids, found.logprobs, strict=True)
        top = tuple(TokenLogprob(*self._vocabulary.token(other), logprob) for other, logprob in best)
        return TokenLogprob(text, raw, found.chosen, top)

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        if len(self._prompt_logprobs) < len(self.request.prompt):
            return ()
        taken, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return taken

    def _timings(self, now: float) -> Timings:
        request = self.request
        started = now if request.started_s is None else request.started_s
        first = now if request.first_token_s is None else request.first_token_s
        return Timings(
            queued_s=started - request.arrived_s,
            prefill_s=max(0.0, first - started),
            decode_s=now - first,
            cached_prompt_tokens=max(
                0, min(request.cached_tokens, request.prompt_len) - request.virtual_tokens
            ),
            preemptions=request.preemptions,
        )
