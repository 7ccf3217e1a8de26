"""What the engine's process makes of variants: slots of its settings, grammars that end as a variant does."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from site_engine import engine_process
from site_engine.config import SiteConfig, VariantConfig
from site_engine.core.chain import Chain
from site_engine.core.startup import StartUp
from site_engine.engine import loading
from site_engine.engine.loading import grammars_of
from site_engine.engine_client import Listener, Prepared
from site_engine.engine_process import MAX_OTHERS, GrammarCompiler
from site_engine.native import NativeEngine
from tests.support.engine_models import engine_for, family, tokenizer
from tests.support.variants import lora, served
from tests.unit.engine_variants_interface_test import answer, assigned


def test_a_grammar_ends_with_the_end_token_of_its_variant() -> None:
    compiler, model = GrammarCompiler(), family("llama").served
    compiler.begin(model.tokenizer, model, StartUp(time.monotonic))
    compiler.wait()
    first, second, end = (tokenizer().convert_tokens_to_ids(each) for each in "abz")
    assert tokenizer().eos_token_id != end
    source = "start: /[a-y]{2,9}/"
    takes = {}
    for name, ends in (("base", None), ("variant", (end,))):
        guide = compiler.compile(source, ends).start()
        assert guide.take(first)
        assert guide.take(second)
        takes[name] = guide.take(end)
    assert takes == {"base": False, "variant": True}


def test_the_vocabulary_of_few_end_tokens_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 80 MB of a real model's; variants with others may come for days."""
    compiler, model, read = GrammarCompiler(), family("llama").served, list[tuple[int, ...]]()
    compiler.begin(model.tokenizer, model, StartUp(time.monotonic))
    compiler.wait()

    def noted(tokenizer: Any, vocab_size: int, ends: tuple[int, ...]) -> Any:
        read.append(ends)
        return grammars_of(tokenizer, vocab_size, ends)

    monkeypatch.setattr(engine_process, "grammars_of", noted)
    ends = [(token_id,) for token_id in range(40, 40 + MAX_OTHERS + 1)]
    for each in [*ends[:-1], ends[0], ends[-1], ends[0], ends[1]]:
        assert compiler.compile("start: /[a-y]{2,9}/", each).start()
    assert read == [*ends, ends[1]], "what was used longest ago is read again"


def test_slots_on_a_gpu_fit_the_largest_adapter_of_the_configuration(tmp_path: Path) -> None:
    variants = []
    for name, contents in {
        "small": {"r": 4},
        "patterned": {"r": 8, "rank_pattern": {"q_proj": 24}},
        "bad": {"r": "many"},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(contents))
        variants.append(VariantConfig(name, adapter=str(tmp_path / name)))
    variants.append(VariantConfig("missing", adapter=str(tmp_path / "missing")))

    def config(*chosen: VariantConfig, **more: Any) -> SiteConfig:
        return SiteConfig(site="a", gateways=("127.0.0.1:1",), model="m", variants=chosen, **more)

    def slots(site: SiteConfig, device: str) -> tuple[int | None, int]:
        settings = loading._settings(site, device)
        return settings.adapter_slots, settings.adapter_rank

    assert slots(config(), "cuda") == (None, 16)
    assert slots(config(models_from=("/srv",)), "cuda") == (8, 16)
    assert slots(config(training=True), "cuda") == (8, 16)
    assert slots(config(*variants), "cuda") == (8, 24)
    assert slots(config(*variants), "cpu") == (None, 24)


def test_an_adapter_with_end_tokens_but_no_tokenizer_uses_the_bases(tmp_path: Path) -> None:
    model, plain = served()
    made = lora(tmp_path / "ends", plain)
    (tmp_path / "ends" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))

    async def run() -> tuple[Chain, Prepared]:
        engine = engine_for(model)
        loaded = loading.Loaded(engine, model.tokenizer, loading.facts_of(model, engine))
        client = NativeEngine.from_loaded(loaded, asyncio.get_running_loop().call_soon_threadsafe)
        client.start(Listener(lambda outputs: None, lambda seen: None, lambda reason: None))
        try:
            chain = await answer(client.add_variant, made.variant)
            return chain, await answer(client.prepare, assigned("ends"))
        finally:
            await asyncio.to_thread(client.stop)

    chain, prepared = asyncio.run(run())
    assert isinstance(chain, Chain), chain
    assert chain.eos_token_ids == (7,)
    assert prepared.chain == "ends"
    assert prepared.token_ids == tuple(model.tokenizer.encode("abc"))
