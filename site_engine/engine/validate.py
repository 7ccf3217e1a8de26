"""Validate requests before they are queued, so that no request can fail later because of its contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite

from site_engine.core.chain import ServedVariant
from site_engine.core.request import (
    MAX_LOGPROBS,
    Moved,
    RejectionReason,
    Request,
    RequestRejected,
    Sampling,
)


def validate_request(
    request: Request,
    limit_tokens: int,
    vocab_size: int,
    variants: Mapping[str, ServedVariant],
    moved: Moved | None,
) -> None:
    """Raise RequestRejected, with the reason and the field, for a request that cannot be served."""
    variant = request.variant or variants.get(request.chain)
    if request.chain and variant is None:
        raise RequestRejected(
            RejectionReason.MODEL_UNKNOWN, f"{request.chain} is not served here any more", "model"
        )
    if moved is not None and variant is not None and variant.fingerprint != moved.fingerprint:
        raise RequestRejected(
            RejectionReason.MODEL_UNKNOWN,
            f"{request.chain} has other contents here than where the answer began",
            "model",
        )
    if not request.prompt:
        raise _invalid("prompt", "the prompt is empty")
    virtual = 0 if variant is None else variant.virtual_tokens
    if virtual + len(request.prompt) >= limit_tokens:
        raise RequestRejected(
            RejectionReason.CONTEXT_LENGTH,
            f"the prompt has {len(request.prompt)} tokens, but prompt and response together "
            f"may have at most {limit_tokens - virtual} here",
            "prompt",
        )
    sampling = request.sampling
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("resume", request.resumed, vocab_size)
    _check_ids("logit_bias", sampling.logit_bias, vocab_size)
    _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if (sampling.logprobs or 0) > MAX_LOGPROBS:
        raise _invalid("logprobs", f"logprobs is {sampling.logprobs}; it may be {MAX_LOGPROBS} at most")
    if "" in sampling.stop:
        raise _invalid("stop", "stop holds an empty string")
    for name, (number, limit) in _lower_bounds(sampling).items():
        if not (isfinite(number) and number >= limit):
            raise _invalid(name, f"{name} is {number}; it must be a number of at least {limit:g}")


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise _invalid(name, f"{name} holds token id {token_id}, outside 0 to {vocab_size - 1}")


def _lower_bounds(sampling: Sampling) -> dict[str, tuple[float, float]]:
    """Return each numeric field's value and its least allowed value.

    For logit biases the value is one that is not finite, if any, since `min` may miss a NaN.
    """
    biases = sampling.logit_bias.values()
    return {
        "max_tokens": (sampling.max_tokens or 0, 0.0),
        "temperature": (sampling.temperature, 0.0),
        "top_p": (sampling.top_p, 0.0),
        "top_k": (sampling.top_k, 0.0),
        "min_p": (sampling.min_p, 0.0),
        "min_tokens": (sampling.min_tokens, 0.0),
        "logprobs": (sampling.logprobs or 0, 0.0),
        "repetition_penalty": (sampling.repetition_penalty, 0.01),
        "presence_penalty": (sampling.presence_penalty, -100.0),
        "frequency_penalty": (sampling.frequency_penalty, -100.0),
        "logit_bias": (next((one for one in biases if not isfinite(one)), min(biases, default=0.0)), -1000.0),
    }


def _invalid(param: str, message: str) -> RequestRejected:
    return RequestRejected(RejectionReason.INVALID, message, param)
