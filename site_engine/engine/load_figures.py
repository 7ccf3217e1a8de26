"""Compute the load figures of an engine: running and waiting requests, free KV memory, measured speed."""

from __future__ import annotations

from site_engine.core.load import LoadFigures, Meter, condense
from site_engine.core.scheduler import Scheduler
from site_engine.engine.training_loop import TrainingLoop


def load_figures(
    scheduler: Scheduler, meter: Meter, training: TrainingLoop, *, slots: int, floor_s: float
) -> LoadFigures:
    """Return the current figures. No iteration is shorter than `floor_s`."""
    queue, pool = scheduler.queue, scheduler.kv_cache_manager.pool
    remaining = [request.expected_remaining() for request in scheduler.running]
    # at least one each: an overlapped step counts a token as computed before its successor is known
    unread = sum([max(1, len(each.tokens) - each.computed) for each in scheduler.running])
    preempted = [(len(request.tokens), request.expected_remaining()) for request in scheduler.preempted]
    values, weight = condense(remaining)
    cost = meter.fit.cost()
    longest_s = cost.seconds(slots, scheduler.token_budget, pool.capacity * pool.page_size)
    prompt_tokens = queue.prompt_tokens + sum(tokens for tokens, _ in preempted)
    response_tokens = queue.response_tokens + sum(expected for _, expected in preempted)
    return LoadFigures(
        running=len(scheduler.running),
        pending=len(queue) + len(preempted),
        token_load=sum(remaining) + unread + prompt_tokens + response_tokens,
        kv_free_tokens=pool.available * pool.page_size,
        kv_reserved_tokens=scheduler.reservation.reserved_tokens(),
        tokens_per_s=meter.tokens_per_s,
        seconds_per_iteration=meter.seconds_per_iteration,
        iteration=cost,
        running_remaining=values,
        running_weight=weight,
        pending_prompt_tokens=prompt_tokens,
        pending_response_tokens=response_tokens,
        tokens_total=meter.tokens_total,
        prompt_tokens_total=meter.prompt_tokens_total,
        unread_tokens=unread,
        longest_iteration_s=max(longest_s, floor_s),
        training=len(training.jobs),
        training_s_per_iteration=training.added_s,
        kv_extra_tokens=pool.extra * pool.page_size,
        computed_tokens_total=meter.computed_tokens_total,
        resident=scheduler.resident_adapters,
    )
