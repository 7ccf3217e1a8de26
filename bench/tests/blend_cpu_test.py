"""Compare what is counted of an offline batch with the real engine: each iteration, each page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.blend import Job, counted, lines_of
from bench.blend_cpu import Run, shorter, small_model
from bench.support.offline_served import ORDERS
from site_engine.core.load import CostFit
from site_engine.engine.settings import EngineSettings

DOCUMENTS = Job("documents and stories", "longest", 0.0, "peak", 2.0, 1500, 32, 0, "")
CHATS = Job("chats", "blend", 0.0, "peak", 4.0, 400, 64, 0, "")
PAGE_SIZE = 4


def reading_weights() -> CostFit:
    """Return the fit of a device on which prompts are computed in pieces."""
    fit = CostFit()
    for prompt in [0, 64, 1024] * 99:
        fit.observe(4, 4 + prompt, 0, max(1.0, (4 + prompt) / 64))
    return fit


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small a model takes many times as long on several threads of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("job", [DOCUMENTS, CHATS, CHATS._replace(order="longest")])
def test_as_many_iterations_and_cached_tokens_are_counted_as_the_engine_has(job: Job) -> None:
    settings = EngineSettings(slots=job.rows, kv_tokens=job.kv_tokens, page_size=PAGE_SIZE, max_pending=4096)
    lines, fit = shorter(lines_of(job), 16), reading_weights()
    with torch.inference_mode():
        run = Run(small_model(job.kv_tokens), settings, lines, ORDERS[job.order], fit)
        while run.turn():
            pass
    counts = counted(job, lines, lambda plan: 0.003, settings.token_budget_on("cpu"), PAGE_SIZE, fit)
    ended = run.serving.ended
    assert (ended.iterations, ended.cached_tokens) == (counts.iterations, counts.cached)
    assert ended.preemptions == counts.preemptions
