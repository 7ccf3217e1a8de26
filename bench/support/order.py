"""The orders in which a workload's queries can start."""

from __future__ import annotations

from typing import NamedTuple

from site_engine.core.request import Lane, Request
from site_engine.core.request_queue import DEFAULT_POLICY, POLICIES, Policy


class Order(NamedTuple):
    policy: Policy
    lane: Lane


def _longest_first(request: Request, _aged: float) -> float:
    return -request.expected_remaining()


ORDERS = {
    "arrival": Order(POLICIES["fcfs"], Lane.CHAT),  # as vLLM and transformers take them
    "chat": Order(DEFAULT_POLICY, Lane.CHAT),  # the least latency per token
    "batch": Order(
        Policy(score=_longest_first), Lane.BATCH
    ),  # the whole in the least time: the longest first
}
