"""Generate a few short responses before a site joins, so that its first load figures are measured."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from site_engine.core.request import Finish, Request, Sampling

if TYPE_CHECKING:
    from site_engine.engine.engine import SiteEngine

PROMPT_TOKENS = 32
RESPONSE_TOKENS = 8


def warm_up(engine: SiteEngine, vocab_size: int, room_tokens: int) -> None:
    """Run one request alone, then one per slot, to measure the cost of an iteration and of a row.

    The engine must be idle and is idle again afterwards; its totals do not count these requests. Raises
    RuntimeError if a response fails.
    """
    length = min(PROMPT_TOKENS, room_tokens - RESPONSE_TOKENS)
    if length < 1:
        return
    ids = Random(0)
    for rows in dict.fromkeys((1, engine.settings.slots)):
        for row in range(min(rows, engine.settings.max_pending)):
            prompt = tuple(ids.randrange(vocab_size) for _ in range(length))
            sampling = Sampling(max_tokens=RESPONSE_TOKENS, temperature=0.0, ignore_eos=True)
            engine.submit(Request(id=f"warm-up-{rows}-{row}", prompt=prompt, sampling=sampling))
        while engine.has_work:
            for output in engine.step():
                if output.finish is Finish.FAILED:
                    raise RuntimeError(f"a first short answer failed: {output.error}")
    engine.forget_totals()
