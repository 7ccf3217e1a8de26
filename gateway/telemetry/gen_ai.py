"""Attributes and metrics of a query by OpenTelemetry's conventions for generative AI, since version 1.37.

Names of metrics are those that the conventions for Prometheus make of OpenTelemetry's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry

from gateway.outcome import Outcome
from gateway.telemetry.families import Histogram, Histograms

PROVIDER: Final = "mico"
AttributeValue = str | int | float | tuple[str, ...]
_OF_ALL = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**exponent for exponent in range(14))


def span_attributes(outcome: Outcome) -> dict[str, AttributeValue]:
    """Return the attributes of the span of a query."""
    ending = outcome.ending
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": ending.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": outcome.asked_model or outcome.model,
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.completion_tokens,
    }
    optional: Mapping[str, AttributeValue | None] = {
        "gen_ai.response.model": outcome.model if ending.finish_reasons else None,
        "gen_ai.response.finish_reasons": ending.finish_reasons,
        "gen_ai.response.time_to_first_chunk": outcome.first_token_s,
        "gen_ai.usage.cache_read.input_tokens": ending.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": ending.reasoning_tokens,
        "error.type": ending.error_type,
    }
    return found | {name: value for name, value in optional.items() if value}


class _Labelled(NamedTuple):
    """The metrics of queries that are alike."""

    duration: Histogram
    first: Histogram
    per_token: Histogram
    input_tokens: Histogram
    output_tokens: Histogram


class GenAiMetrics:
    """The metrics of a server. Queries that no site was tried for are left out: their models are what clients
    write, without end.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histograms:
            labelled = (*_OF_ALL, *labels)
            return Histograms(f"gen_ai_server_{name}_seconds", text, labelled, registry, buckets=buckets)

        self._duration = seconds("request_duration", "From arrival to the end", _DURATION_S, "error_type")
        self._first = seconds("time_to_first_token", "From arrival to the first token", _FIRST_S)
        self._per_token = seconds(
            "time_per_output_token", "Mean time of a token after the first", _PER_TOKEN_S
        )
        self._usage = Histograms(
            "gen_ai_client_token_usage",
            "Tokens of prompts and of answers",
            (*_OF_ALL, "gen_ai_token_type"),
            registry,
            buckets=_TOKENS,
        )
        self._labelled: dict[tuple[str, ...], _Labelled] = {}

    def keep(self, models: Container[str]) -> None:
        """Remove the metrics of answers of other models than these."""
        for family in (self._duration, self._first, self._per_token, self._usage):
            family.keep("gen_ai_response_model", models)
        for labels in [each for each in self._labelled if each[2] not in models]:
            del self._labelled[labels]

    def observe(self, outcome: Outcome) -> None:
        """Count a query that ended."""
        if not outcome.attempts:
            return
        ending = outcome.ending
        labels = ending.operation, outcome.asked_model or outcome.model, outcome.model, ending.error_type
        of = self._labelled.get(labels) or self._label(*labels)
        of.duration.observe(outcome.total_s)
        of.input_tokens.observe(outcome.prompt_tokens)
        of.output_tokens.observe(outcome.completion_tokens)
        if outcome.first_token_s is None:
            return
        of.first.observe(outcome.first_token_s)
        if outcome.completion_tokens > 1:
            rest_s = outcome.total_s - outcome.first_token_s
            of.per_token.observe(rest_s / (outcome.completion_tokens - 1))

    def _label(self, operation: str, asked_model: str, model: str, error_type: str) -> _Labelled:
        """Return the metrics with these labels, and keep them: to look them up takes longer than to count."""
        of_all = operation, PROVIDER, asked_model, model
        found = self._labelled[operation, asked_model, model, error_type] = _Labelled(
            self._duration.of(*of_all, error_type),
            self._first.of(*of_all),
            self._per_token.of(*of_all),
            self._usage.of(*of_all, "input"),
            self._usage.of(*of_all, "output"),
        )
        return found
