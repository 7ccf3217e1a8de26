"""Adapters as peft itself makes and saves them give the tokens that peft gives, unmerged."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from site_engine.core.chain import Variant
from tests.support.engine_models import VOCAB, drain, engine_for, greedy, greedy_answer
from tests.support.variants import Made, served

peft = pytest.importorskip(
    "peft", reason="peft is not installed: adapters are compared with plain hooks alone"
)
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, about models that are no files

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ALL},
    "patterns": {
        "r": 4,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 12},
        "alpha_pattern": {"^model.layers.0.self_attn.k_proj": 32},
    },
    "one layer": {"r": 4, "target_modules": ALL, "layers_to_transform": [1]},
    "every linear": {"r": 2, "target_modules": "all-linear"},
    "a pattern of names": {"r": 3, "target_modules": r".*\.mlp\..*_proj"},
    "biases": {"r": 2, "target_modules": ["q_proj", "k_proj"], "bias": "all"},
    "their biases": {"r": 2, "target_modules": ["q_proj", "k_proj"], "bias": "lora_only"},
    "a whole head": {"r": 2, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "norm"]},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "down_proj"]},
    "a whole embedding": {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
}


def saved(folder: Path, plain: Any, seed: int, **config: Any) -> Made:
    """Have peft make an adapter, give it random numbers, save it."""
    alone = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    draw = torch.Generator().manual_seed(seed)
    trained = {name for name, _ in alone.named_parameters()} & peft.get_peft_model_state_dict(alone).keys()
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if parameter.requires_grad or name in trained:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.15)
    alone.save_pretrained(str(folder))
    return Made(Variant(folder.name, adapter=str(folder)), alone)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_answers_are_those_of_peft(name: str, tmp_path: Path) -> None:
    model, plain = served(name)
    made = [saved(tmp_path / str(at), plain, at, **config) for at, config in enumerate(CONFIGS.values())]
    engine = engine_for(model)
    for each in made:
        engine.add_variant(each.variant)
    draw = random.Random(2)
    cases = []
    for at in range(3 * len(made)):
        prompt = [draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 9, 30)))]
        cases.append((made[at % len(made)], prompt))
        request = greedy(str(at), prompt, 10)
        request.chain = cases[-1][0].variant.id
        engine.submit(request)
    answers = drain(engine)
    for at, (each, prompt) in enumerate(cases):
        assert answers[str(at)].token_ids == each.answer(prompt, 10), list(CONFIGS)[at % len(made)]


@pytest.mark.parametrize("projection", [False, True])
def test_prefix_tuning_answers_as_peft_does(projection: bool, tmp_path: Path) -> None:
    model, plain = served()
    config = peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prefix_projection=projection, encoder_hidden_size=16
    )
    alone = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in alone.prompt_encoder.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    alone.save_pretrained(str(tmp_path))
    engine = engine_for(model)
    engine.add_variant(Variant("tuned", adapter=str(tmp_path)))
    draw = random.Random(3)
    prompts = [[draw.randrange(1, VOCAB) for _ in range(count)] for count in (1, 9, 30)]
    for at, prompt in enumerate(prompts):
        request = greedy(str(at), prompt, 12)
        request.chain = "tuned"
        engine.submit(request)
    answers = drain(engine)
    for at, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        for _ in range(12):
            with torch.no_grad():
                logits = alone(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        assert answers[str(at)].token_ids == ids[0, len(prompt) :].tolist()
        assert answers[str(at)].token_ids == greedy_answer(alone, prompt, 12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), "DoRA is not served"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "kind IA3 are not served"),
        (peft.PromptTuningConfig(num_virtual_tokens=3), "kind PROMPT_TUNING are not served"),
        (peft.LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True), "sets lora_bias"),
    ],
)
def test_other_kinds_of_peft_are_refused(config: Any, reason: str, tmp_path: Path) -> None:
    from site_engine.errors import VariantRefused

    model, plain = served()
    config.task_type = "CAUSAL_LM"
    peft.get_peft_model(copy.deepcopy(plain), config).save_pretrained(str(tmp_path))
    with pytest.raises(VariantRefused, match=reason):
        engine_for(model).add_variant(Variant("a", adapter=str(tmp_path)))
