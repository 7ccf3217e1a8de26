"""Engines whose steps overlap, over small models; a test that imports this imports `interpreted` before."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

from site_engine.cuda.llama_forward import llama_forward
from site_engine.engine.build import overlapped_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import from_model
from tests.support.engine_models import FAMILIES, Family, Ticks, random_model, uncertified


def overlapped(of: Family, *, fused: bool = False, certified: bool = False, **settings: int) -> SiteEngine:
    chosen = {"slots": 4, "token_budget": 40, "page_size": 4, "kv_tokens": 256} | settings
    forward = llama_forward(of.served) if fused else None
    with nullcontext() if certified else uncertified():
        return overlapped_engine(of.served, EngineSettings(**chosen, debug_poison=True), Ticks(), forward)


def requests(count: int, seed: int = 3) -> list[tuple[list[int], int]]:
    rnd = random.Random(seed)
    return [
        ([rnd.randrange(1, 300) for _ in range(rnd.choice((1, 5, 17, 30)))], rnd.choice((1, 2, 5, 8)))
        for _ in range(count)
    ]


def fused_family(name: str) -> Family:
    plain = random_model(FAMILIES[name]())
    return Family(from_model(copy.deepcopy(plain), eos_token_ids=()), plain)
