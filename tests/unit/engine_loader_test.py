"""Models come in whole or not at all: loading, what a model says of itself, refusals with a reason."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gateway.openai.sampling import MODEL_DEFAULTS
from site_engine.config import DEFERRALS, SiteConfig
from site_engine.core.request import Request, Sampling
from site_engine.core.slack import Bounds, Deferral
from site_engine.engine import warmup
from site_engine.engine.engine import SiteEngine
from site_engine.engine.loading import load_engine
from site_engine.errors import ModelNotSupported
from site_engine.model.loader import from_model, load
from site_engine.model.weights import reader
from tests.support.engine_models import CONTEXT, FAMILIES, VOCAB, drain, engine_for, family, tokenizer
from tests.support.model_families import random_model

torch.set_num_threads(1)


def saved(folder: Path, shard: str = "5GB") -> Path:
    model = random_model(FAMILIES["llama"]())
    model.generation_config.eos_token_id = [0, 7]
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_folder_is_served_as_it_was_saved(tmp_path: Path, shard: str) -> None:
    loaded = load(str(saved(tmp_path / "tiny", shard)))
    assert (len(list((tmp_path / "tiny").glob("*.safetensors"))) > 1) == (shard == "20KB")
    assert (loaded.name, loaded.context_tokens, loaded.vocab_size) == ("tiny", CONTEXT, VOCAB)
    assert loaded.eos_token_ids == (0, 7)
    engine = engine_for(loaded)
    engine.submit(Request("a", [4, 5, 6], Sampling(max_tokens=8, temperature=0, ignore_eos=True)))
    assert drain(engine)["a"].token_ids == family("llama").generate([4, 5, 6], 8)


def test_a_model_in_the_current_folder_has_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(saved(tmp_path / "tiny"))
    assert load(".").name == "tiny"


DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


def test_the_models_own_defaults_hold_for_what_is_left_out(tmp_path: Path) -> None:
    folder = saved(tmp_path / "own")
    (folder / "generation_config.json").write_text(
        json.dumps({**DEFAULTS, "do_sample": True, "eos_token_id": 7, "max_new_tokens": 9})
    )
    engine = engine_for(load(str(folder)))
    asked = {
        "nothing given": Sampling(left_out=frozenset(MODEL_DEFAULTS)),
        "a temperature": Sampling(temperature=0.2, left_out=frozenset(MODEL_DEFAULTS) - {"temperature"}),
        "all given": Sampling(),
    }
    requests = {name: Request(name, [4, 5], sampling) for name, sampling in asked.items()}
    for request in requests.values():
        engine.submit(request)

    def used(name: str) -> dict[str, float]:
        return {key: getattr(requests[name].sampling, key) for key in DEFAULTS}

    assert used("nothing given") == DEFAULTS
    assert used("a temperature") == DEFAULTS | {"temperature": 0.2}
    assert requests["all given"].sampling == Sampling()
    assert requests["nothing given"].max_tokens == CONTEXT - 2  # a limit of examples is none of clients


def test_a_model_that_does_not_sample_is_greedy_by_default(tmp_path: Path) -> None:
    folder = saved(tmp_path / "greedy")
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    assert load(str(folder)).sampling_defaults == {"temperature": 0.0}
    assert load(str(saved(tmp_path / "plain"))).sampling_defaults == {}


def test_what_loads_on_a_cpu_ends_with_its_openmp_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they exist, those of the thread that steps sleep between any two operations."""
    loaded_on: list[threading.Thread] = []
    warm_up = warmup.warm_up

    def noted(*given: Any) -> None:
        loaded_on.append(threading.current_thread())
        warm_up(*given)

    monkeypatch.setattr(warmup, "warm_up", noted)
    load_engine(SiteConfig(site="a", gateways=("gw:1",), model=str(saved(tmp_path)), device="cpu"))
    assert [thread.is_alive() for thread in loaded_on] == [False]


def test_openais_defaults_can_be_chosen(tmp_path: Path) -> None:
    folder = saved(tmp_path / "chosen")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    asked = Sampling(left_out=frozenset({"temperature"}))

    def temperature(**settings: str) -> float:
        config = SiteConfig(
            site="a", gateways=("gw:1",), model=str(folder), device="cpu", kv_tokens=256, **settings
        )
        engine = load_engine(config).engine
        request = Request("a", [4, 5], asked)
        engine.submit(request)
        return request.sampling.temperature

    assert temperature() == 0.6
    assert temperature(sampling_defaults="openai") == 1.0


def test_a_site_trains_within_the_bounds_of_its_configuration(tmp_path: Path) -> None:
    folder = saved(tmp_path)

    def bounds(**more: object) -> Bounds:
        settings: dict[str, Any] = {"device": "cpu", "kv_tokens": 256, "training": True} | more
        engine = load_engine(SiteConfig(site="a", gateways=("gw:1",), model=str(folder), **settings)).engine
        assert isinstance(engine, SiteEngine)
        return engine.settings.training

    assert bounds() == Bounds()
    found = bounds(training_between_tokens_s=0.3, training_least_share=0.1, training_deferral="iteration")
    assert found == Bounds(0.3, least_share=0.1, deferral=Deferral.ITERATION)
    assert {each.value for each in Deferral} == set(DEFERRALS)


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 3.0},
        {"temperature": -1.0},
        {"min_p": "a"},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [0, None]},
    ],
)
def test_defaults_that_mean_nothing_are_refused_by_name(values: dict[str, object]) -> None:
    model = random_model(FAMILIES["llama"]())
    for name, value in values.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ModelNotSupported, match="|".join(values)):
        from_model(model, tokenizer())


def test_the_revision_names_the_weights(tmp_path: Path) -> None:
    first = load(str(saved(tmp_path / "a"))).revision
    assert load(str(saved(tmp_path / "b"))).revision == first
    other = random_model(FAMILIES["llama"](), seed=1)
    other.save_pretrained(tmp_path / "a")
    assert load(str(tmp_path / "a")).revision != first


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"cannot load .* the folder has no config\.json"):
        load(str(tmp_path))


@pytest.mark.parametrize("path", ["/srv/nowhere", "./nowhere"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(ModelNotSupported, match=r"cannot load .* there is no such folder"):
        load(path)


def test_files_that_lack_tensors_are_refused_by_name(tmp_path: Path) -> None:
    """transformers gives such a model random weights in their place."""
    folder = saved(tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"lack 1 tensors .* model.layers.1.mlp.up_proj.weight"):
        load(str(folder))
    on_device = reader(folder, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelNotSupported, match="lack 1 tensors"):
        load(str(folder), weights=on_device)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"\x90\x08\x00\x00\x00\x00\x00\x00{"),
        ("model.safetensors", b""),
        ("tokenizer.json", b"{}"),
        ("config.json", b'{"model_type": "llama", "num_hidden_layers": "two"}'),
    ],
)
def test_a_file_that_cannot_be_read_is_a_reason_to_refuse(tmp_path: Path, name: str, content: bytes) -> None:
    folder = saved(tmp_path / "cut")
    (folder / name).write_bytes(content)
    with pytest.raises(ModelNotSupported, match="cannot load"):
        load(str(folder))


def test_weights_that_could_run_code_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "pickled")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save(random_model(FAMILIES["llama"]()).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelNotSupported, match="cannot load"):
        load(str(folder))


def test_half_precision_is_served(tmp_path: Path) -> None:
    loaded = load(str(saved(tmp_path / "half")), dtype="bfloat16")
    assert loaded.dtype is torch.bfloat16
    engine = engine_for(loaded)
    engine.submit(Request("a", [4, 5, 6], Sampling(max_tokens=5, temperature=0)))
    assert drain(engine)["a"].last is not None


class Shifted(torch.nn.Module):
    """A layer norm that does something different when tokens of several requests are packed."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden) + hidden.mean(dim=1, keepdim=True)


def test_a_model_that_mixes_rows_is_refused() -> None:
    model = copy.deepcopy(family("llama").plain)
    model.model.norm = Shifted(model.model.norm)
    with pytest.raises(ModelNotSupported, match="other logits on packed tokens"):
        from_model(model)


def test_a_model_that_is_not_causal_is_refused() -> None:
    config = FAMILIES["llama"]()
    config.is_causal = False
    model = random_model(config)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ModelNotSupported, match="not causal"):
        from_model(model)


def test_a_recurrent_model_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4)
    with pytest.raises(ModelNotSupported):
        from_model(random_model(config))


def test_a_rotary_scaling_that_follows_the_longest_row_ends_the_context_early() -> None:
    config = FAMILIES["llama"]()
    config.rope_parameters = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 48,
    }
    assert from_model(random_model(config)).context_tokens == 48
