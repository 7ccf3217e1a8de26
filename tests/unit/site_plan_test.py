"""What a site needs is read from headers: files that are sparse have them, and no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from site_engine.config import SiteConfig, VariantConfig
from site_engine.errors import ConfigError
from site_engine.plan import Gpus, Plan, parse_gpus, plan, plan_groups

LAYERS, WIDTH, KV_HEADS, HEAD_DIM, VOCABULARY = 32, 4096, 8, 128, 128_256
Q = "model.layers.{}.self_attn.q_proj"
MODULES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (14_336, WIDTH),
    "mlp.up_proj": (14_336, WIDTH),
    "mlp.down_proj": (WIDTH, 14_336),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": 32,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": 14_336,
}
BASE = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "lm_head.weight": (VOCABULARY, WIDTH),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in MODULES.items()
    },
}
NUMBERS = sum(map(prod, BASE.values()))
PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2


def write(path: Path, shapes: Mapping[str, tuple[int, ...]], missing_bytes: int = 0) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end - missing_bytes)  # sparse


def adapter(rank: int, width: int = WIDTH, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    named = [f"base_model.model.{Q.format(layer)}" for layer in range(layers)]
    halves = {f"{name}.lora_A.weight": (rank, width) for name in named}
    return halves | {f"{name}.lora_B.weight": (WIDTH, rank) for name in named}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "base" / "model.safetensors", BASE)
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    write(tmp_path / "lora" / "adapter_model.safetensors", adapter(16))
    write(tmp_path / "tuned" / "model.safetensors", BASE)
    return tmp_path


def planned(folder: Path, gpus: str = "H200", *variants: VariantConfig, **settings: Any) -> Plan:
    config = SiteConfig(
        site="a", gateways=("g:1",), model=str(folder / "base"), variants=variants, **settings
    )
    return plan(config, parse_gpus(gpus))


def of_adapter(folder: Path, name: str = "lora") -> VariantConfig:
    return VariantConfig(name, adapter=str(folder / name))


def test_bytes_are_those_of_the_tensors_and_the_rest_holds_keys_and_values(folder: Path) -> None:
    tuned = VariantConfig("tuned", model=str(folder / "tuned"))
    found = planned(folder, "H200", of_adapter(folder), tuned, device="cpu", dtype="bfloat16")
    own = 2 * sum(map(prod, adapter(16).values()))
    assert (found.shared_bytes, found.kv_bytes_per_token) == (2 * NUMBERS, PER_TOKEN)
    assert [(each.id, each.own_bytes) for each in found.variants] == [("lora", own), ("tuned", 2 * NUMBERS)]
    assert found.own_bytes == own + 2 * NUMBERS
    assert not found.refused
    held = found.shared_bytes + found.own_bytes + found.kv_tokens * PER_TOKEN
    assert held <= found.gpus.bytes
    assert found.kv_tokens == (found.gpus.bytes - 2 * NUMBERS) // 4 // PER_TOKEN
    on_gpu = planned(folder, "H200")
    assert on_gpu.kv_tokens == int((on_gpu.gpus.bytes - 2 * NUMBERS) * 0.85) // PER_TOKEN


def test_numbers_on_a_cpu_have_four_bytes_and_no_gpu_lends_it_memory(folder: Path) -> None:
    found = planned(folder, "40GiB", of_adapter(folder), device="cpu")
    assert (found.shared_bytes, found.kv_bytes_per_token) == (4 * NUMBERS, 2 * PER_TOKEN)
    assert found.own_bytes == 4 * sum(map(prod, adapter(16).values())) and not found.refused
    assert planned(folder, "24GiB", device="cpu").refused
    site = SiteConfig(site="a", gateways=("g:1",), model=str(folder / "base"), device="cpu")
    with pytest.raises(ConfigError, match="device is cpu: --gpus 64GiB would be"):
        plan_groups([site], parse_gpus("H200"))
    assert not plan_groups([site], parse_gpus("64GiB"))[0].refused


@pytest.mark.parametrize(
    ("settings", "requests"),
    [({}, 256), ({"slots": 8}, 8), ({"device": "cpu", "dtype": "bfloat16"}, 32)],
)
def test_keys_and_values_have_no_more_room_than_all_requests_could_fill(
    folder: Path, settings: dict[str, Any], requests: int
) -> None:
    """An engine takes no more; a plan that gave them all memory refused variants that have room."""
    (folder / "base" / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 1024}))
    tuned = [VariantConfig(f"tuned-{number}", model=str(folder / "tuned")) for number in range(3)]
    found = planned(folder, "H200", *tuned, **settings)
    assert found.kv_tokens == requests * 1024 and not found.refused
    assert planned(folder, "24GiB", **settings).kv_tokens < 256 * 1024
    assert planned(folder, "H200", kv_tokens=10**6, **settings).kv_tokens == 10**6


def test_no_plan_exceeds_memory_and_who_finds_no_room_is_told_both_numbers(folder: Path) -> None:
    tuned = [VariantConfig(f"tuned-{number}", model=str(folder / "tuned")) for number in range(9)]
    found = planned(folder, "H200", *tuned, device="cpu")
    assert 0 < len(found.variants) < len(tuned)
    assert len(found.variants) + len(found.refused) == len(tuned)
    assert found.used_bytes <= found.gpus.bytes
    reason = found.refused["tuned-8"]
    assert f"it needs {4 * NUMBERS:,} bytes, and " in reason and "kv_tokens may be fewer" in reason
    assert not planned(folder, "H200", *tuned[:3], kv_tokens=1000, device="cpu").refused


def test_a_base_that_does_not_fit_is_refused_with_the_numbers(folder: Path) -> None:
    found = planned(folder, "1x4GiB", of_adapter(folder))
    (of_base,) = (reason for name, reason in found.refused.items() if name.endswith("base"))
    assert f"the base has {2 * NUMBERS:,} bytes" in of_base and f"a device has {4 * 2**30:,}" in of_base


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        (adapter(128), "has rank 128; the limit is 64"),
        (adapter(8, width=2048), "wrong base: model.layers.0.self_attn.q_proj is (4096, 4096), its adapter"),
        (adapter(8, layers=33), "the base has no module model.layers.32.self_attn.q_proj"),
        (dict(list(adapter(8).items())[: LAYERS + 1]), "has half a product"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    folder: Path, shapes: dict[str, tuple[int, ...]], complaint: str
) -> None:
    write(folder / "odd" / "adapter_model.safetensors", shapes)
    found = planned(folder, "H200", of_adapter(folder, "odd"), of_adapter(folder))
    assert complaint in found.refused["odd"]
    assert [each.id for each in found.variants] == ["lora"]


def test_files_that_are_cut_pickled_or_no_safetensors_are_refused(folder: Path) -> None:
    write(folder / "cut" / "adapter_model.safetensors", adapter(8), missing_bytes=1)
    for name, file in (("pickle", "adapter_model.bin"), ("odd", "adapter_model.safetensors")):
        (folder / name).mkdir()
        (folder / name / file).write_bytes(b"\x80" * 100)
    names = ("cut", "pickle", "odd", "absent")
    refused = planned(folder, "H200", *(of_adapter(folder, name) for name in names)).refused
    assert "is cut: " in refused["cut"]
    assert "pickles can run code and are not read" in refused["pickle"]
    assert "is no safetensors file: a header of" in refused["odd"]
    assert "needs adapter_model.safetensors: there is none" in refused["absent"]


def test_a_model_of_other_shapes_is_refused(folder: Path) -> None:
    wide = {**BASE, f"{Q.format(3)}.weight": (WIDTH, 2048)}
    write(folder / "wide" / "model.safetensors", wide)
    lacking = {name: shape for name, shape in BASE.items() if ".31." not in name}
    write(folder / "lacking" / "model.safetensors", lacking)
    tied = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}
    write(folder / "tied" / "model.safetensors", tied)
    variants = [VariantConfig(name, model=str(folder / name)) for name in ("wide", "lacking", "tied")]
    found = planned(folder, "H200", *variants, kv_tokens=1000, device="cpu")
    assert "wrong base: model.layers.3.self_attn.q_proj.weight is (4096, 2048)" in found.refused["wide"]
    assert "it lacks 7 tensors of the base" in found.refused["lacking"]
    assert [each.id for each in found.variants] == ["tied"]


def test_a_device_of_several_holds_its_share_of_the_layers_and_the_embeddings_whole(folder: Path) -> None:
    both_ends = 2 * VOCABULARY * WIDTH
    found = planned(folder, "2xH200", devices=("cuda:0+cuda:1",))
    assert (found.ranks, found.kv_bytes_per_token) == (2, PER_TOKEN // 2)
    assert found.shared_bytes == NUMBERS - both_ends + 2 * both_ends
    assert found.kv_tokens == int((found.gpus.bytes - found.shared_bytes) * 0.85) // (PER_TOKEN // 2)
    many = "+".join(f"cuda:{number}" for number in range(2 * KV_HEADS))
    assert planned(folder, devices=(many,)).kv_bytes_per_token == PER_TOKEN // KV_HEADS
    (reason,) = planned(folder, "3xH200", devices=("cuda:0+cuda:1+cuda:2",)).refused.values()
    assert reason == "32 attention heads cannot be divided over 3 devices"


def test_gpus_are_named_or_sized() -> None:
    assert parse_gpus("H200") == Gpus(1, "H200", 143_771 * 2**20)
    assert parse_gpus("2xH200").devices == 2
    assert parse_gpus("4x22.5GiB") == Gpus(4, "22.5 GiB", int(22.5 * 2**30))
    for wrong in ("", "0xH200", "H300", "2x", "24GB", "-1xH200", "2xH200x"):
        with pytest.raises(ConfigError, match="COUNTxNAME"):
            parse_gpus(wrong)


def test_each_device_holds_the_weights_and_has_keys_and_values_of_its_own(folder: Path) -> None:
    lora = VariantConfig("l", adapter=str(folder / "lora"))
    found = planned(folder, "2xH200", lora, devices=("cuda:0", "cuda:1"), kv_tokens=1000)
    first, second = found.devices
    assert (first.device, second.device) == ("cuda:0", "cuda:1")
    assert first[1:] == second[1:]
    assert first.weights_bytes == found.shared_bytes + found.slots_bytes + found.own_bytes
    assert first.kv_bytes == 1000 * PER_TOKEN
    assert first.weights_bytes + first.kv_bytes + first.left_bytes == found.gpus.bytes
    assert not found.refused


def test_a_device_that_there_is_not_is_refused(folder: Path) -> None:
    found = planned(folder, "2xH200", devices=("cuda:0", "cuda:1", "cuda:2"))
    assert [each.device for each in found.devices] == ["cuda:0", "cuda:1"]
    assert found.refused == {"cuda:2": "the configuration names 3 devices, and there are 2"}
    assert not planned(folder, "H200", devices=("cpu", "cpu")).refused


def test_a_base_that_is_not_here_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be planned: .* needs model.safetensors: there is none"):
        planned(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"shape": [-1, 2], "data_offsets": [0, 0]}}',
        b'{"a": {"shape": [1], "data_offsets": []}}',
        b'{"a": {"shape": "12", "data_offsets": [0, 1e400]}}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(folder: Path, header: bytes) -> None:
    (folder / "odd").mkdir()
    file = folder / "odd" / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "cannot be read" in planned(folder, "H200", of_adapter(folder, "odd")).refused["odd"]


@pytest.mark.parametrize("config", ["{}", "[]", '{"num_attention_heads": 0}', "{", '{"text_config": 3}'])
def test_a_base_whose_configuration_makes_no_sense_cannot_be_planned(folder: Path, config: str) -> None:
    (folder / "base" / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="cannot be planned"):
        planned(folder)


def test_a_site_in_front_of_a_server_has_no_weights_to_plan() -> None:
    config = SiteConfig(site="a", gateways=("g:1",), engine="openai", url="http://server")
    with pytest.raises(ConfigError, match="a server has no weights"):
        plan(config, parse_gpus("H200"))


def test_slots_for_adapters_on_a_gpu_are_as_large_as_the_arenas(folder: Path) -> None:
    """Whatever is in them, and also where only orders may bring adapters."""
    per_layer = sum(sum(shape) for shape in MODULES.values())
    with_slots = planned(folder, "H200", of_adapter(folder))
    assert [each.own_bytes for each in with_slots.variants] == [0]
    assert with_slots.slots_bytes == 8 * LAYERS * (16 * per_layer * 2 + 4 * len(MODULES))
    assert with_slots.kv_tokens == (
        int((with_slots.gpus.bytes - 2 * NUMBERS - with_slots.slots_bytes) * 0.85) // PER_TOKEN
    )
    assert planned(folder, models_from=("/srv",)).slots_bytes == with_slots.slots_bytes
    assert (
        planned(folder).slots_bytes == planned(folder, models_from=("/srv",), device="cpu").slots_bytes == 0
    )
    write(folder / "large" / "adapter_model.safetensors", adapter(40))
    (folder / "large" / "adapter_config.json").write_text('{"r": 40}')
    large = planned(folder, "H200", of_adapter(folder, "large"))
    assert large.slots_bytes == 8 * LAYERS * (64 * per_layer * 2 + 4 * len(MODULES))
    assert not large.refused
    small = planned(folder, "1x4GiB", of_adapter(folder)).refused
    (of_base,) = (reason for name, reason in small.items() if name.endswith("base"))
    assert f"of which slots for adapters take {with_slots.slots_bytes:,}" in of_base


def test_slots_are_the_arenas_that_the_engine_allocates() -> None:
    import torch

    from site_engine.cuda.adapters import AdapterArenas
    from site_engine.variants.projections import Size, slot_bytes

    sizes = [Size(32, (48, 16, 16), True), Size(48, (32,)), Size(32, (96, 96)), Size(96, (32,))]
    for rank in (1, 16, 17, 40):
        arenas = AdapterArenas(sizes, 3, 5, rank, torch.zeros(1, dtype=torch.bfloat16))
        held = sum(each.nbytes for arena in arenas._arenas for each in arena[:4])
        assert held == 5 * slot_bytes(sizes, 3, rank, 2)
        assert held == arenas.bytes - sum(each.spans.nbytes for each in arenas._arenas)


def test_what_a_gpu_does_not_serve_is_refused_with_the_reason(folder: Path) -> None:
    head = {"base_model.model.lm_head.lora_A.weight": (8, WIDTH)}
    head["base_model.model.lm_head.lora_B.weight"] = (VOCABULARY, 8)
    bias = {f"base_model.model.{Q.format(0)}.bias": (WIDTH,)}
    dora = {f"base_model.model.{Q.format(0)}.lora_magnitude_vector": (WIDTH,)}
    for name, more in (("head", head), ("bias", bias), ("deep", adapter(24)), ("dora", dora)):
        write(folder / name / "adapter_model.safetensors", {**adapter(8), **more})
    (folder / "deep" / "adapter_config.json").write_text('{"r": 8}')
    variants = [of_adapter(folder, name) for name in ("head", "bias", "deep", "dora", "lora")]
    variants.append(VariantConfig("tuned", model=str(folder / "tuned")))
    found = planned(folder, "H200", *variants)
    from site_engine.variants.projections import SERVED_ON_GPU as serves  # noqa: N811

    assert found.refused == {
        "head": f"it changes lm_head; {serves}",
        "bias": f"it changes {Q.format(0)}.bias; {serves}",
        "deep": f"{Q.format(0)} has rank 24; slots here have 16",
        "dora": "DoRA is not served: its norms depend on the merged weight",
    }
    on_cpu = planned(folder, "H200", *variants, device="cpu", kv_tokens=1000)
    assert set(on_cpu.refused) == {"dora"}
    assert planned(folder, "H200", *variants, devices=("cpu", "cpu"), kv_tokens=1000).slots_bytes == 0
    assert [each.id for each in found.variants] == ["lora", "tuned"]
    (folder / "base" / "config.json").write_text(
        json.dumps({**CONFIG, "architectures": ["Qwen3ForCausalLM"]})
    )
    reason = planned(folder, "H200", of_adapter(folder)).refused["lora"]
    assert reason.startswith("engines on a GPU serve variants of LlamaForCausalLM, ")
    assert not planned(folder, "H200", of_adapter(folder), device="cpu").refused


def test_biases_that_the_base_has_and_prefix_tuning_are_planned_for_a_gpu(folder: Path) -> None:
    biases = {f"{Q.format(layer)}.bias": (WIDTH,) for layer in range(LAYERS)}
    before = planned(folder, models_from=("/srv",)).slots_bytes
    write(folder / "base" / "model.safetensors", BASE | biases)
    own = {f"base_model.model.{name}": shape for name, shape in biases.items()}
    write(folder / "bias" / "adapter_model.safetensors", own | adapter(8))
    write(folder / "prefix" / "adapter_model.safetensors", {"prompt_embeddings": (20, PER_TOKEN // 2)})
    write(folder / "wrong" / "adapter_model.safetensors", {"prompt_embeddings": (20, PER_TOKEN)})
    found = planned(folder, "H200", *(of_adapter(folder, name) for name in ("bias", "prefix", "wrong")))
    assert [(each.id, each.own_bytes) for each in found.variants] == [("bias", 0), ("prefix", 20 * PER_TOKEN)]
    assert found.refused.keys() == {"wrong"}
    assert f"the base needs {PER_TOKEN // 2} numbers a token" in found.refused["wrong"]
    columns = sum(MODULES[f"self_attn.{name}_proj"][0] for name in "qkv")
    assert found.slots_bytes == before + 8 * LAYERS * columns * 2


def test_groups_of_one_process_share_the_device(folder: Path) -> None:
    def config(name: str, kv_tokens: int) -> SiteConfig:
        base = str(folder / "base")
        return SiteConfig(site=name, gateways=("g:1",), model=base, kv_tokens=kv_tokens)

    gpus = parse_gpus("1x40GiB")
    one, two = plan_groups([config("one", 10_000), config("two", 20_000)], gpus)
    assert (one.site, two.site, one.gpus, two.gpus) == ("one", "two", gpus, gpus)
    assert not one.refused and not two.refused
    *_, third = plan_groups([config(name, 10_000) for name in ("one", "two", "three")], gpus)
    (reason,) = third.refused.values()
    assert f"a device has {gpus.bytes - one.used_bytes - one.used_bytes:,}" in reason
