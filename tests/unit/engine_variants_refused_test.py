"""What cannot be served exactly is refused with numbers and a reason, and disturbs nobody."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from site_engine.core.chain import Variant
from site_engine.errors import VariantRefused
from site_engine.variants import store
from tests.support.engine_models import drain, engine_for, gather, greedy
from tests.support.variants import Made, fine_tuned, lora, prefix_tuned, served, write_adapter

torch.set_num_threads(1)
WEIGHTS = "adapter_model.safetensors"


def test_each_bad_folder_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    model, plain = served()
    engine = engine_for(model)
    fine = lora(tmp_path / "fine", plain)
    engine.add_variant(fine.variant)
    prompt = [5, 6, 7, 8]
    running = greedy("running", prompt, 60)
    running.chain = "fine"
    engine.submit(running)
    collected: dict[str, Any] = {}
    for number, (name, (make, reason)) in enumerate(BAD.items()):
        variant = make(tmp_path / f"bad-{number}", plain)
        with pytest.raises(VariantRefused, match=reason):
            engine.add_variant(variant)
        assert list(engine.variants) == ["fine"], name
        gather(engine.step(), collected)
    assert drain(engine, collected)["running"].token_ids == fine.answer(prompt, 60)


Make = Callable[[Path, Any], Variant]


def changed(
    change: Callable[[dict[str, torch.Tensor]], None], make_folder: Callable[..., Made] = lora
) -> Make:
    """Return the maker of an adapter's folder whose tensors are changed afterwards."""

    def make(folder: Path, plain: Any) -> Variant:
        made = make_folder(folder, plain)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)
        return made.variant

    return make


def cut(folder: Path, plain: Any) -> Variant:
    made = lora(folder, plain)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    return made.variant


def cut_model(folder: Path, plain: Any) -> Variant:
    made = fine_tuned(folder, plain, lambda name: "lm_head" in name)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    return made.variant


def pickled(folder: Path, plain: Any) -> Variant:
    made = lora(folder, plain)
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({}))
    return made.variant


def pickled_model(folder: Path, plain: Any) -> Variant:
    made = fine_tuned(folder, plain, lambda name: "lm_head" in name)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return made.variant


def other_model(**sizes: int) -> Make:
    def make(folder: Path, plain: Any) -> Variant:
        config = transformers.LlamaConfig(**{**plain.config.to_dict(), **sizes})
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        return Variant(folder.name, model=str(folder))

    return make


def half_a_model(folder: Path, plain: Any) -> Variant:
    made = fine_tuned(folder, plain, lambda name: "lm_head" in name)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    return made.variant


def same_model(folder: Path, plain: Any) -> Variant:
    return fine_tuned(folder, plain, lambda name: False).variant


def without_numbers(folder: Path, plain: Any) -> Variant:
    made = fine_tuned(folder, plain, lambda name: "lm_head" in name)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return made.variant


def larger_vocabulary(folder: Path, plain: Any) -> Variant:
    head = torch.zeros(plain.config.vocab_size + 2, plain.config.hidden_size)
    tensors = {"base_model.model.lm_head.weight": head}
    return write_adapter(folder, {"peft_type": "LORA", "modules_to_save": ["lm_head"]}, tensors)


def configured(**settings: Any) -> Make:
    return lambda folder, plain: lora(folder, plain, **settings).variant


def prefixed(**settings: Any) -> Make:
    return lambda folder, plain: prefix_tuned(folder, plain, **settings).variant


def other_kind(kind: str) -> Make:
    return lambda folder, plain: write_adapter(folder, {"peft_type": kind}, {"x": torch.zeros(1)})


def bottleneck(folder: Path, plain: Any) -> Variant:
    config = {"config": {"architecture": "adapter", "reduction_factor": 16}, "model_type": "llama"}
    return write_adapter(folder, config, {"x": torch.zeros(1)})


def no_settings(folder: Path, plain: Any) -> Variant:
    made = lora(folder, plain)
    (folder / "adapter_config.json").write_text(json.dumps([1]))
    return made.variant


def edited(**settings: Any) -> Make:
    """Return the maker of an adapter whose settings are changed afterwards."""

    def make(folder: Path, plain: Any) -> Variant:
        made = lora(folder, plain)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        return made.variant

    return make


def with_file(name: str, text: str) -> Make:
    def make(folder: Path, plain: Any) -> Variant:
        made = lora(folder, plain)
        (folder / name).write_text(text)
        return made.variant

    return make


def with_end_tokens(*ids: Any) -> Make:
    return with_file("generation_config.json", json.dumps({"eos_token_id": ids}))


def unending(folder: Path, plain: Any) -> Variant:
    made = lora(folder, plain)
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")  # whoever reads it waits for ever
    return made.variant


def in_use(folder: Path, plain: Any) -> Variant:
    return lora(folder, plain).variant._replace(id="fine")


def named_as_the_base(folder: Path, plain: Any) -> Variant:
    return lora(folder, plain).variant._replace(id="llama")


Q, V = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.1.self_attn.v_proj"
BAD: dict[str, tuple[Make, str]] = {
    "cut": (cut, r"adapter_model.safetensors cannot be read"),
    "a cut model": (cut_model, r"model.safetensors cannot be read"),
    "pickle": (pickled, r"adapter_model.bin is a pickle, which can run code"),
    "a pickled model": (pickled_model, r"pickles can run code"),
    "another base": (
        changed(lambda them: them.update({f"{Q}.lora_A.weight": torch.zeros(4, 48)})),
        r"wrong base: .*q_proj is \(32, 32\) here, its adapter \(32, 4\) x \(4, 48\)",
    ),
    "rank": (configured(rank=65), r"rank 65 .* at most 64"),
    "NaN": (
        changed(lambda them: them[f"{V}.lora_B.weight"].view(-1)[:2].fill_(torch.nan)),
        r"v_proj.lora_B.weight holds 2 numbers that are not finite",
    ),
    "infinite": (without_numbers, r"lm_head.weight holds 1 numbers that are not finite"),
    "DoRA": (configured(use_dora=True), r"DoRA is not served"),
    "a vector of magnitudes": (
        changed(lambda them: them.update({f"{Q}.lora_magnitude_vector": torch.ones(32)})),
        r"DoRA is not served",
    ),
    "bottleneck": (bottleneck, r"kind unknown are not served"),
    "IA3": (other_kind("IA3"), r"kind IA3 are not served"),
    "prompt tuning": (other_kind("PROMPT_TUNING"), r"kind PROMPT_TUNING are not served"),
    "prefix tuning without tokens": (other_kind("PREFIX_TUNING"), r"holds x, not prompt_embeddings alone"),
    "prefix tuning of other heads": (
        prefixed(num_attention_heads=4),
        r"wrong base: keys of 4 heads, and of 2 in the base",
    ),
    "prefix tuning of another length": (prefixed(num_virtual_tokens=7), r"has 6 virtual tokens and says 7"),
    "prefix tuning of another base": (
        changed(lambda them: them.update(prompt_embeddings=torch.zeros(6, 60)), prefix_tuned),
        r"wrong base: prompt_embeddings is \(6, 60\), and a token has 64 numbers in the base",
    ),
    "prefix tuning with NaN": (
        changed(lambda them: them["prompt_embeddings"][0, 0].fill_(torch.nan), prefix_tuned),
        r"prompt_embeddings holds 1 numbers that are not finite",
    ),
    "prefix tuning with more": (prefixed(modules_to_save=["lm_head"]), r"sets modules_to_save"),
    "an unknown setting": (configured(layer_replication=[[0, 2]]), r"sets layer_replication"),
    "a changed base": (configured(init_lora_weights="pissa"), r"'pissa' trains beside a changed base"),
    "settings that are none": (no_settings, r"holds no settings"),
    "an unknown module": (
        changed(
            lambda them: them.update(
                {f"{Q}x.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"}  # its name ends otherwise
            )
        ),
        r"the base has no module model.layers.0.self_attn.q_projx",
    ),
    "thousands of tensors": (
        changed(lambda them: them.update({f"{Q}.n{i}": torch.zeros(1) for i in range(1_000)})),
        r"has 1,028 tensors, and an adapter of this base at most \d+",
    ),
    "settings without an end": (
        with_file("adapter_config.json", "[" * 100_000),
        r"adapter_config.json cannot",
    ),
    "large settings": (
        with_file("adapter_config.json", " " * 1_000_001),
        r"adapter_config.json has 1,000,001 bytes, and at most 1,000,000 are read",
    ),
    "settings that are no file": (unending, r"adapter_config.json is no file"),
    "a pattern that takes for ever": (
        edited(alpha_pattern={r"([\w.]+)+!": 3}),
        r"alpha_pattern has '\(\[\\\\w\.\]\+\)\+!', and only names of modules are served",
    ),
    "patterns that are none": (edited(alpha_pattern=["q_proj"]), r"alpha_pattern is a list"),
    "modules that are none": (edited(modules_to_save=5), r"modules_to_save is a int"),
    "a kind that is none": (edited(peft_type=["LORA"]), r"kind \['LORA'\] are not served"),
    "a scale without a number": (edited(lora_alpha=float("nan")), r"lora_alpha of .* is nan, not a number"),
    "end tokens that are none": (with_end_tokens("</s>"), r"eos_token_id names '</s>'; ids here"),
    "settings of answers that are none": (
        with_file("generation_config.json", "[1]"),
        r"generation_config.json cannot be read",
    ),
    "half a product": (changed(lambda them: them.pop(f"{Q}.lora_B.weight")), r"q_proj has only half"),
    "missing layers": (
        changed(lambda them: [them.pop(name) for name in list(them) if ".layers.1." in name]),
        r"has nothing for 7 modules that it targets, model.layers.1.mlp.down_proj the first",
    ),
    "a missing module": (configured(modules_to_save=["lm_head"]), r"lacks lm_head of modules_to_save"),
    "a larger vocabulary": (larger_vocabulary, r"its vocabulary is another: lm_head.weight is \(322, 32\)"),
    "a model's larger vocabulary": (
        other_model(vocab_size=330),
        r"its vocabulary is another: 330 tokens, the base's 320",
    ),
    "a model of other layers": (
        other_model(num_hidden_layers=3),
        r"wrong base: .*num_hidden_layers is 3, and 2",
    ),
    "half a model": (
        half_a_model,
        r"lacks 1 tensors of the base, model.layers.1.mlp.up_proj.weight the first",
    ),
    "the base": (same_model, r"holds the base itself"),
    "no folder": (lambda folder, plain: Variant("none", adapter=str(folder)), r"needs the folder"),
    "nothing": (lambda folder, plain: Variant("none"), r"needs the folder"),
    "a name in use": (in_use, r"the name 'fine' is in use"),
    "the base's name": (named_as_the_base, r"the name 'llama' is in use"),
}


def test_a_variant_without_room_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = served()
    small, large = lora(tmp_path / "small", plain, rank=1), lora(tmp_path / "large", plain, rank=32)
    model_of_its_own = fine_tuned(tmp_path / "own", plain, lambda name: True)
    monkeypatch.setattr(store, "free_bytes", lambda: 40_000)
    engine = engine_for(model)
    engine.add_variant(small.variant)
    for made in (large, model_of_its_own):
        with pytest.raises(VariantRefused, match=r"bytes.* and there is room for 20,000"):
            engine.add_variant(made.variant)
    assert list(engine.variants) == ["small"]


def test_what_is_not_served_cannot_be_removed(tmp_path: Path) -> None:
    model, plain = served()
    engine = engine_for(model)
    with pytest.raises(VariantRefused, match="ghost is not served here"):
        engine.remove_variant("ghost")
    engine.add_variant(lora(tmp_path / "a", plain).variant)
    engine.remove_variant("a")
    with pytest.raises(VariantRefused, match="a is not served here"):
        engine.remove_variant("a")
    assert not engine.variants


def test_the_index_of_a_save_before_does_not_stand_for_a_single_file(tmp_path: Path) -> None:
    model, plain = served()
    plain.save_pretrained(tmp_path / "tuned", max_shard_size="20KB")
    made = fine_tuned(tmp_path / "tuned", plain, lambda name: "lm_head" in name)
    assert (tmp_path / "tuned" / "model.safetensors.index.json").is_file()
    engine = engine_for(model)
    engine.add_variant(made.variant)
    request = greedy("a", [5, 6, 7, 8], 20)
    request.chain = "tuned"
    engine.submit(request)
    assert drain(engine)["a"].token_ids == made.answer([5, 6, 7, 8], 20)
