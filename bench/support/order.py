"""The orders in which a workload's queries can start."""

from __future__ import annotations

from typing import NamedTuple

from site_engine.core.request import Lane, Request
from site_engine.core.request_queue import DEFAULT_POLICY, POLICIES, Policy


class Order(NamedTuple):
    """The policy and the lane with which an engine takes the queries of a workload."""

    policy: Policy
    lane: Lane


def _longest_first(request: Request, _aged: float) -> float:
    return -request.expected_remaining()


ORDERS = {
    "arrival": Order(POLICIES["fcfs"], Lane.CHAT),
    "chat": Order(DEFAULT_POLICY, Lane.CHAT),
    "batch": Order(Policy(score=_longest_first), Lane.BATCH),
}
"""`arrival`: as vLLM and transformers take them. `chat`: for the least latency per token.
`batch`: the longest first, so that the whole ends soonest.
"""
