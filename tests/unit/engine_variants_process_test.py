"""What the engine's process makes of variants: slots of its settings, grammars that end as a variant does."""

from __future__ import annotations

import json
import time
from pathlib import Path

from site_engine.config import SiteConfig, VariantConfig
from site_engine.core.startup import StartUp
from site_engine.engine import loading
from site_engine.engine_process import GrammarCompiler
from tests.support.engine_models import family, tokenizer


def test_a_grammar_ends_with_the_end_token_of_its_variant() -> None:
    compiler = GrammarCompiler()
    compiler.begin(family("llama").served, StartUp(time.monotonic))
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

    def config(*chosen: VariantConfig, models_from: tuple[str, ...] = ()) -> SiteConfig:
        return SiteConfig(
            site="a", gateways=("127.0.0.1:1",), model="m", variants=chosen, models_from=models_from
        )

    def slots(site: SiteConfig, device: str) -> tuple[int | None, int]:
        settings = loading._settings(site, device)
        return settings.adapter_slots, settings.adapter_rank

    assert slots(config(), "cuda") == (None, 16)
    assert slots(config(models_from=("/srv",)), "cuda") == (8, 16)
    assert slots(config(*variants), "cuda") == (8, 24)
    assert slots(config(*variants), "cpu") == (None, 24)
