"""A few short answers before a site joins: its first figures are measured, not guessed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from site_engine.core.request import Finish, Request, Sampling

if TYPE_CHECKING:
    from site_engine.engine.engine import SiteEngine

PROMPT_TOKENS = 32
RESPONSE_TOKENS = 8


def warm_up(engine: SiteEngine, vocab_size: int, room_tokens: int) -> None:
    """One answer alone, then as many at once as there are slots: what an iteration costs, and a row of it.

    The engine must be idle, and is idle again; nothing of this is in its totals. Raises RuntimeError when an
    answer fails.
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
