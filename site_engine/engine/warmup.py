"""Generate a few short responses before a site joins, so that its first load figures are measured."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from site_engine.core.request import Finish, Request, Sampling

if TYPE_CHECKING:
    from site_engine.engine.engine import SiteEngine

PROMPT_TOKENS = 32
RESPONSE_TOKENS = 8
SOME_TOKENS = (1_200, 2_500, 5_000)
"""Lengths of prompts that are too long for a CUDA graph, if the token budget is larger than a graph."""
FEW_ROWS, MANY_ROWS, LONG_CONTEXT = 8, 128, 600
"""Decoding rows beside which long prompts run; a long context is split into several parts by attention."""


def warm_up(engine: SiteEngine, vocab_size: int, room_tokens: int, longest: int = 0) -> None:
    """Run one request alone, then one per slot, to measure the cost of an iteration and of a row.

    With `longest`, prompts of up to that many tokens follow, alone and beside answers, so that a device has
    compiled and loaded what their steps need. The engine must be idle and is idle again afterwards; its
    totals do not count these requests. Raises RuntimeError if a response fails.
    """
    length = min(PROMPT_TOKENS, room_tokens - RESPONSE_TOKENS)
    if length < 1:
        return
    ids = Random(0)

    def submit(rows: int, length: int, tokens: int) -> None:
        for row in range(min(rows, engine.settings.max_pending)):
            prompt = tuple(ids.randrange(vocab_size) for _ in range(length))
            sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            tenant = f"warm-up-{row}"  # one of its own: a single tenant may not fill the queue
            engine.submit(Request(f"warm-up-{length}-{tokens}-{row}", prompt, sampling, tenant=tenant))

    for rows in dict.fromkeys((1, engine.settings.slots)):
        submit(rows, length, RESPONSE_TOKENS)
        _finish(engine)
    longest = min(longest, room_tokens - RESPONSE_TOKENS)
    if longest > length:
        for tokens in SOME_TOKENS:
            submit(1, min(tokens, longest), 1)
            _finish(engine)
        for rows, context in (
            (0, 0),
            (FEW_ROWS, length),
            (FEW_ROWS, min(LONG_CONTEXT, longest)),
            (MANY_ROWS, length),
        ):
            submit(rows, context, 2 * RESPONSE_TOKENS)
            for _ in range(RESPONSE_TOKENS):
                engine.step()
            submit(1, longest, 1)
            _finish(engine)
    engine.forget_totals()


def _finish(engine: SiteEngine) -> None:
    while engine.has_work:
        for output in engine.step():
            if output.finish is Finish.FAILED:
                raise RuntimeError(f"a first short answer failed: {output.error}")
