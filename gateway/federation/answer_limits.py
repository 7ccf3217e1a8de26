"""Bounds the output of one attempt by the request, whatever its site claims."""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain import Query, SiteIdentity
from gateway.prompt import Chat, Pooling

TOKENS_PER_GUESS, TEMPLATE_TOKENS = 16, 4_096
"""A prompt has at most one token a byte, four bytes a character, and what a chat template adds. The guess of
its tokens is a quarter of its characters.
"""
TOKEN_BYTES = 1_024
"""The longest tokens are runs of some hundred spaces."""
ALTERNATIVE_BYTES = 512
OVERHEAD_BYTES = 2**20
UNKNOWN_CONTEXT_TOKENS = 1_000_000


class AnswerLimits(NamedTuple):
    """Counts above these are cut, parts that were not asked for are dropped, and more bytes end the link.

    `completion_tokens` is that of one choice, `wire_bytes` of all. `alternatives` of each token, None where
    no logprobs were asked for. `stops`: the strings that may end a choice.
    """

    prompt_tokens: int
    completion_tokens: int
    wire_bytes: int
    alternatives: int | None = None
    echo: bool = False
    tools: bool = False
    stops: tuple[str, ...] = ()
    inputs: int = 0  # to embed or to rank
    text_alone: bool = False  # nothing beside text was asked for: no logprobs, tools or inputs

    @staticmethod
    def of(query: Query, site: SiteIdentity, prompt_tokens_guess: int) -> AnswerLimits:
        """`prompt_tokens_guess` includes the part of a resumed answer that was delivered."""
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
        """Each input is a prompt of its own, so that all of them may have more tokens than a context."""
        prompt_tokens = TOKENS_PER_GUESS * prompt.tokens + TEMPLATE_TOKENS * prompt.inputs
        return AnswerLimits(prompt_tokens, 0, OVERHEAD_BYTES + prompt.result_bytes, inputs=prompt.inputs)
