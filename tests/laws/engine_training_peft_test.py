"""Training gives the gradients, losses and adapters of peft and of the Trainer of transformers."""

from __future__ import annotations

import copy
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.training import WARMUP_SHARE, AdapterShape, Recipe, StepDone
from site_engine.training.adapter import new_adapter, write_folder
from site_engine.training.micro_batch import run_micro_batch
from site_engine.training.packing import batch_at, pack
from site_engine.training.sliced_model import SlicedModel
from tests.support.engine_models import FAMILIES
from tests.support.model_families import random_model
from tests.support.training import examples, run, trainer

peft = pytest.importorskip(
    "peft", reason="peft is not installed: training is compared with differences alone"
)
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, about models that are no files


def adapted(plain: Any, adapter: Any, shape: AdapterShape, name: str) -> tuple[Any, dict[str, Any]]:
    """Return peft's model with the same factors, and its parameters by the names of ours."""
    config = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules="all-linear",
        lora_dropout=0.0,
        fan_in_fan_out=name == "gpt2",
    )
    made = peft.get_peft_model(copy.deepcopy(plain), config, autocast_adapter_dtype=False)
    named = {each.replace(".default", ""): one for each, one in made.named_parameters() if "lora_" in each}
    with torch.no_grad():
        for each, tensor in adapter.tensors().items():
            named[each].copy_(tensor)
    assert named.keys() == adapter.tensors().keys()
    return made, named


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_peft_one_example_at_a_time(name: str) -> None:
    plain, shape = random_model(FAMILIES[name]()).double(), AdapterShape(4, 8.0)
    model = SlicedModel(plain)
    adapter = new_adapter(model.targets(shape), shape, seed=1)
    with torch.no_grad():
        for _, up in adapter.factors.values():
            up.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(2))
    data = examples(5, seed=3).examples
    packed = pack(data)
    slices = run_micro_batch(model, adapter, model.attach(adapter), packed, len(packed.targets))
    gradients: list[torch.Tensor] = []
    while not gradients:
        try:
            next(slices)
        except StopIteration as end:
            gradients = end.value.gradients
    made, named = adapted(plain, adapter, shape, name)
    for example in data:
        ids, learned = torch.from_numpy(example.ids), torch.from_numpy(example.learned).nonzero()[:, 0]
        logits = made(input_ids=ids[None], use_cache=False).logits[0]
        loss = F.cross_entropy(logits[learned - 1], ids[learned], reduction="sum") / len(packed.targets)
        loss.backward()
    expected = [named[each].grad for each in adapter.tensors()]
    off = sum(float((a - b).norm() ** 2) for a, b in zip(gradients, expected, strict=True)) ** 0.5
    assert off / sum(float(b.norm() ** 2) for b in expected) ** 0.5 < 1e-12


def test_twenty_steps_have_the_losses_of_the_trainer_of_transformers(tmp_path: Path) -> None:
    recipe = Recipe(epochs=4, batch_size=8, learning_rate=3e-3, seed=3, shape=AdapterShape(4, 8.0))
    plain, data = random_model(FAMILIES["llama"]()), examples(40, seed=6)
    job = trainer(data, recipe, plain, train_tokens=100)
    made, _ = adapted(plain, job.adapter, recipe.shape, "llama")
    ours = [event.loss for event in run(job) if isinstance(event, StepDone)]
    order = chain.from_iterable(batch_at(step, 40, recipe) for step in range(20))
    rows = [
        {
            "input_ids": torch.from_numpy(example.ids),
            "labels": torch.from_numpy(example.ids).where(torch.from_numpy(example.learned), -100),
        }
        for example in (data.examples[number] for number in order)
    ]

    def pad(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [row[name] for row in batch], batch_first=True, padding_value=fill
            )

        labels, ids = padded("labels", -100), padded("input_ids", 0)
        lengths = torch.tensor([len(row["input_ids"]) for row in batch])
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None],
        }

    theirs = transformers.Trainer(
        made,
        transformers.TrainingArguments(
            output_dir=str(tmp_path),
            num_train_epochs=1,
            per_device_train_batch_size=8,
            learning_rate=recipe.learning_rate,
            warmup_steps=round(WARMUP_SHARE * 20),
            train_sampling_strategy="sequential",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=pad,
    )
    theirs.train()
    losses = [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]
    assert len(ours) == len(losses) == 20
    assert max(abs(a - b) for a, b in zip(ours, losses, strict=True)) < 1e-4
    assert ours[-1] < ours[0]


def test_a_written_folder_is_read_by_peft(tmp_path: Path) -> None:
    recipe = Recipe(epochs=3, batch_size=4, learning_rate=0.05, shape=AdapterShape(4, 8.0))
    plain = random_model(FAMILIES["llama"]())
    job = trainer(examples(8), recipe, plain)
    run(job)
    write_folder(tmp_path / "tuned", job.adapter.tensors(), job.adapter.shape, "base")
    read = peft.PeftModel.from_pretrained(copy.deepcopy(plain), str(tmp_path / "tuned"))
    made, _ = adapted(plain, job.adapter, recipe.shape, "llama")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(read(input_ids=ids).logits, made(input_ids=ids).logits)
