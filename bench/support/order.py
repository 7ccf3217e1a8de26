"""The orders in which a workload's queries can start."""

from __future__ import annotations

from typing import NamedTuple

from site_engine.core.request import Lane
from site_engine.core.request_queue import DEFAULT_POLICY, POLICIES, Policy


class Order(NamedTuple):
    policy: Policy
    lane: Lane


ORDERS = {
    "arrival": Order(POLICIES["fcfs"], Lane.CHAT),  # as vLLM and transformers take them
    "chat": Order(DEFAULT_POLICY, Lane.CHAT),  # the least latency per token
    "batch": Order(DEFAULT_POLICY, Lane.BATCH),  # the whole in the least time: the longest first
}
