"""What the engine's process makes of variants: slots of its settings, grammars that end as a variant does."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from site_engine.config import SiteConfig, VariantConfig
from site_engine.core.chain import Chain
from site_engine.core.startup import StartUp
from site_engine.engine import loading
from site_engine.engine_client import Listener, Prepared
from site_engine.engine_process import GrammarCompiler
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
