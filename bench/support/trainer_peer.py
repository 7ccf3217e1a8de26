"""The Trainer of transformers with peft, on the examples of a job: padded batches, in the same order."""

from __future__ import annotations

import copy
import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

from site_engine.core.training import WARMUP_SHARE, Recipe
from site_engine.training.data import Example
from site_engine.training.packing import batch_at
from site_engine.training.trainer import Trainer

IGNORED = -100


class TrainerPeer:
    """Trains a copy of `plain` from the first factors of a job that has not begun, with its examples in its
    order; with `own_seed` from factors and in an order of its own. It trains where `plain` is. Raises
    ImportError without peft.
    """

    def __init__(self, plain: Any, job: Trainer, recipe: Recipe, own_seed: int | None = None) -> None:
        peft: Any = importlib.import_module("peft")
        config = peft.LoraConfig(
            r=recipe.shape.rank,
            lora_alpha=recipe.shape.alpha,
            target_modules="all-linear",
            lora_dropout=0.0,
        )
        torch.manual_seed(own_seed or 0)
        self._model = peft.get_peft_model(copy.deepcopy(plain), config)
        if own_seed is None:
            named = {name.replace(".default", ""): each for name, each in self._model.named_parameters()}
            with torch.no_grad():
                for name, tensor in job.adapter.tensors().items():
                    named[name].copy_(tensor)
        else:
            recipe = replace(recipe, seed=own_seed)
        self._recipe, self._examples, self._valid = recipe, job.examples, job.valid_examples

    def train(self, *, packs: bool = False, parts: int = 1) -> list[float]:
        """Return the loss of each step; with `packs` a batch is one row of tokens without padding.

        `parts`: micro-batches of a batch, of which the loss is that of the whole.
        """
        steps = self._recipe.total_steps(len(self._examples))
        order = chain.from_iterable(
            batch_at(step, len(self._examples), self._recipe) for step in range(steps)
        )
        collate = packed if packs else padded
        size = self._recipe.batch_size // parts
        with tempfile.TemporaryDirectory() as folder:
            settings = transformers.TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=parts,
                learning_rate=self._recipe.learning_rate,
                warmup_steps=round(WARMUP_SHARE * steps),
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                use_cpu=self._model.device.type == "cpu",
                disable_tqdm=True,
                log_level="error",
            )
            rows = [row(self._examples[number]) for number in order]
            trainer = transformers.Trainer(self._model, settings, train_dataset=rows, data_collator=collate)
            in_order = DataLoader(rows, batch_size=size, collate_fn=collate)
            trainer.get_train_dataloader = lambda: in_order
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def valid_loss(self) -> float:
        """Return the mean loss of the learned tokens of the validation file."""
        total, count, device = 0.0, 0, self._model.device
        self._model.eval()
        for example in self._valid:
            ids = torch.from_numpy(example.ids).to(device)
            learned = torch.from_numpy(example.learned).nonzero()[:, 0].to(device)
            with torch.no_grad():
                logits = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
            total += float(
                torch.nn.functional.cross_entropy(logits[learned - 1], ids[learned], reduction="sum")
            )
            count += len(learned)
        return total / count


def row(example: Example) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(example.ids)
    return {"input_ids": ids, "labels": ids.where(torch.from_numpy(example.learned), IGNORED)}


def padded(batch: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest row, with its attention mask."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each["input_ids"] for each in batch], batch_first=True)
    labels = pad([each["labels"] for each in batch], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(each["input_ids"]) for each in batch])
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.arange(ids.shape[1]) < lengths[:, None],
    }


def packed(batch: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch as one row; transformers tells sequences apart by their positions."""
    labels = [each["labels"].clone() for each in batch]
    for each in labels:
        each[0] = IGNORED  # nothing before predicts it
    return {
        "input_ids": torch.cat([each["input_ids"] for each in batch])[None],
        "labels": torch.cat(labels)[None],
        "position_ids": torch.cat([torch.arange(len(each)) for each in labels])[None],
    }
