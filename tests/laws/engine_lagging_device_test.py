"""The tokens are right if the device computes nothing until the host waits for it, which CUDA allows: a copy
from pinned memory reads the memory when it is its turn on the stream, not when it is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support import interpreted  # noqa: F401

# isort: split

import torch

from site_engine.cuda.cuda_graph import Step
from site_engine.cuda.host_buffers import HostBuffers
from site_engine.cuda.runner import DeviceRunner, DeviceStep
from tests.support.engine_models import drain, family, greedy
from tests.support.overlapped_engines import overlapped


@pytest.fixture
def lagging(monkeypatch: pytest.MonkeyPatch) -> None:
    queue: list[Callable[[], None]] = []
    load, run, start, wait, patch = (
        Step.load,
        Step.run,
        DeviceRunner._start,
        DeviceStep.wait,
        DeviceRunner.patch,
    )

    def catch_up() -> None:
        while queue:
            queue.pop(0)()

    def late_run(self: Step) -> None:
        queue.append(lambda: run(self))
        if self.logits is None:
            self.logits = torch.zeros(self._shape.samples, 1)

    def start_and_wait(self: Any, plan: Any) -> Any:
        found = start(self, plan)
        if found[1]:  # tokens are sampled: the host reads logits, or waits for an event
            catch_up()
        return found

    def late_wait(self: DeviceStep) -> Any:
        catch_up()
        return wait(self)

    def patch_in_order(self: Any, patches: Any) -> None:
        catch_up()
        patch(self, patches)

    monkeypatch.setattr(Step, "load", lambda self, block: queue.append(lambda: load(self, block)))
    monkeypatch.setattr(Step, "run", late_run)
    monkeypatch.setattr(DeviceRunner, "_start", start_and_wait)
    monkeypatch.setattr(DeviceStep, "wait", late_wait)
    monkeypatch.setattr(DeviceRunner, "patch", patch_in_order)
    monkeypatch.setattr(DeviceRunner, "_wait", lambda _: catch_up())


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.usefixtures("lagging")
def test_steps_that_sample_nothing_are_computed_with_their_own_numbers(echo: bool) -> None:
    """A request that waits for its prompt's log probabilities has steps run one by one."""
    of = family("llama")
    engine = overlapped(of, token_budget=8)
    prompt = [(7 * at) % 290 + 1 for at in range(8 * (HostBuffers.IN_TURN + 4))]
    engine.submit(greedy("long", prompt, 4))
    engine.step()
    if echo:
        engine.submit(greedy("echo", [3, 2, 1], 2, logprobs=0, prompt_logprobs=True))
    got = drain(engine)
    assert got["long"].token_ids == of.generate(prompt, 4)
