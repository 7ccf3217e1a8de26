"""Bounds the output of one attempt by its request, so that no site can exceed what was requested."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import Query, SiteIdentity
from gateway.prompt import Chat, Pooling

TOKENS_PER_GUESS, TEMPLATE_TOKENS = 16, 4_096
"""The most tokens of a prompt per guessed token, and those that a chat template adds. A prompt has at most
one token per byte and four bytes per character, and the guess is a quarter of its characters.
"""
TOKEN_BYTES = 1_024
"""The most bytes of a token; the longest are runs of some hundred spaces."""
ALTERNATIVE_BYTES = 512
OVERHEAD_BYTES = 2**20
UNKNOWN_CONTEXT_TOKENS = 1_000_000


class AnswerLimits(NamedTuple):
    """The limits of one answer. Counts above them are cut, parts that were not requested are dropped, and
    more than `wire_bytes` closes the link.

    `completion_tokens` is per choice, `wire_bytes` for all choices. `alternatives`: logprobs per token, None
    if no logprobs were requested. `stops`: the strings that may end a choice.
    """

    prompt_tokens: int
    completion_tokens: int
    wire_bytes: int
    alternatives: int | None = None
    echo: bool = False
    tools: bool = False
    stops: tuple[str, ...] = ()
    inputs: int = 0  # number of inputs to embed or to rank
    text_alone: bool = False  # only text was requested: no logprobs, tools or inputs

    @staticmethod
    def of(query: Query, site: SiteIdentity, prompt_tokens_guess: int) -> AnswerLimits:
        """Return the limits of a query at a site. `prompt_tokens_guess` includes the delivered part of a
        resumed answer.
        """
        if isinstance(query.prompt, Pooling):
            return AnswerLimits.of_pooling(query.prompt)
        sampling, model = query.sampling, site.models.get(query.model)
        context = (model.context_tokens if model is not None else 0) or UNKNOWN_CONTEXT_TOKENS
        prompt_tokens = min(context, TOKENS_PER_GUESS * prompt_tokens_guess + TEMPLATE_TOKENS)
        completion = context if sampling.max_tokens is None else min(context, sampling.max_tokens)
        per_token = TOKEN_BYTES + ALTERNATIVE_BYTES * (sampling.logprobs or 0)
        tokens = (completion + (prompt_tokens if sampling.echo else 0)) * sampling.n
        tools = isinstance(query.prompt, Chat) and bool(query.prompt.tools_json)
        return AnswerLimits(
            prompt_tokens,
            completion,
            OVERHEAD_BYTES + tokens * per_token,
            sampling.logprobs,
            sampling.echo,
            tools,
            sampling.stop,
            text_alone=sampling.logprobs is None and not tools,
        )

    @staticmethod
    def of_pooling(prompt: Pooling) -> AnswerLimits:
        """Return the limits of a pooling query. Each input is a prompt of its own, so that together they may
        have more tokens than a context.
        """
        prompt_tokens = TOKENS_PER_GUESS * prompt.tokens + TEMPLATE_TOKENS * prompt.inputs
        return AnswerLimits(prompt_tokens, 0, OVERHEAD_BYTES + prompt.result_bytes, inputs=prompt.inputs)
