"""The limits and policies of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from site_engine.core.request_queue import DEFAULT_POLICY, Policy
from site_engine.core.slack import Bounds

TOKEN_BUDGETS = {"cpu": 512, "cuda": 1024}
"""Default tokens per iteration by device. On a GPU the largest CUDA graph of prompts beside answers has as
many: the host takes 20 to 50 ms to launch a larger iteration kernel by kernel, and all answers wait for it.
On a CPU longer chunks only delay the requests that decode.
"""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    slots: int = 32  # requests that run at once
    token_budget: int | None = None  # tokens computed per iteration; None: by the device
    page_size: int = 16  # tokens
    kv_tokens: int | None = None  # capacity for keys and values; None: measured from the free memory
    max_pending: int = 1024
    iteration_floor_s: float = 0.0  # shortest iteration; the engine's owner waits, the engine only counts it
    prefix_cache: bool = True
    share_prefixes: bool = False  # also between tenants, who could then time what others have asked
    adapter_slots: int | None = None  # adapters that run at once; None: any number on a CPU, none on a GPU
    adapter_rank: int = 16  # of a slot on a GPU
    sleep: str = "disk"  # disk: its process ends instead; host or a GPU, as cuda:1: where its weights wait
    share_sleeping_memory: bool = False  # the KV cache can grow into the memory of other bases that sleep
    policy: Policy = DEFAULT_POLICY
    training: Bounds = field(default_factory=Bounds)  # what it may cost those that are served
    debug_poison: bool = False  # fill freed pages with NaN

    def __post_init__(self) -> None:
        if min(self.slots, self.page_size, self.max_pending) < 1:
            raise ValueError("slots, page_size and max_pending must be at least 1")
        if self.token_budget is not None and self.token_budget < self.slots:
            raise ValueError(
                f"token_budget ({self.token_budget}) must cover one token of each of {self.slots} slots"
            )

    def token_budget_on(self, device_type: str) -> int:
        """Return the tokens computed per iteration on a device of this torch type."""
        return self.token_budget or max(TOKEN_BUDGETS.get(device_type, 512), 2 * self.slots)
