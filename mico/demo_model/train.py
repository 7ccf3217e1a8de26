"""Train the demo model: `python -m mico.demo_model.train --data FILE --out FOLDER`.

The learning rate falls with the share of the run that is over, in steps or in minutes, whichever is further,
so a run always ends with its weights settled. A run bounded by steps alone repeats exactly on a CPU.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from mico.demo_model.corpus import MADE, Corpus, Made, load_corpus, make_corpus
from mico.demo_model.network import Batches, add_dropout, batch_loss, held_out_loss, model_config

log = logging.getLogger("mico.demo_model.train")

VOCABULARY = 4_096
WARM_UP_SHARE = 0.02
EVALUATIONS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Length and hyperparameters of a training run."""

    steps: int
    minutes: float = 1e6
    batch_windows: int = 64
    peak_learning_rate: float = 2.5e-3
    weight_decay: float = 0.1
    dropout: float = 0.2
    seed: int = 7
    device: str = "cpu"
    compiled: bool = False


DEFAULT_PLAN = Plan(steps=5_700)


def fit(corpus: Corpus, plan: Plan) -> tuple[Any, dict[str, Any]]:
    """Train a model; return it in the best state by held-out loss, and the record of the training."""
    torch.manual_seed(plan.seed)
    model: Any = LlamaForCausalLM(model_config(corpus.tokenizer)).to(plan.device)
    add_dropout(model, plan.dropout)
    held_out, best = Batches(corpus.held_out, plan.device), Best()
    for progress in training_steps(model, Batches(corpus.train, plan.device), plan):
        if progress.evaluation_due:
            loss = held_out_loss(model, held_out, plan.batch_windows)
            best.offer(model, loss)
            log.info("%s, held-out loss %.4f", progress, loss)
    model.load_state_dict(best.state)
    record = {
        "held_out_loss": best.loss,
        "steps": progress.step,
        "passes": progress.passes,
        "tokens_per_s": progress.tokens_per_s,
        "windows": len(corpus.train.tokens),
        "context_tokens": corpus.train.tokens.shape[1],
        "parameters": model.num_parameters(),
        "device": torch.cuda.get_device_name() if plan.device.startswith("cuda") else plan.device,
        "plan": asdict(plan),
    }
    return model, record


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    share_over: float
    passes: float
    tokens_per_s: float
    loss: torch.Tensor
    evaluation_due: bool

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.share_over:.0%} of the run, {self.passes:.1f} passes, "
            f"{self.tokens_per_s:,.0f} tokens/s, loss {self.loss.item():.4f}"
        )


def training_steps(model: Any, train: Batches, plan: Plan) -> Iterator[Progress]:
    """Take one step after the other until the plan's steps or minutes are over."""
    optimizer = optimizer_for(model, plan)
    loss_of = torch.compile(batch_loss) if plan.compiled else batch_loss
    batches = row_batches(len(train.tokens), plan)
    loss_of(model, *train.pick(next(batches))).backward()  # compiles before the clock starts
    started_s, step, share_over, evaluated = time.monotonic(), 0, 0.0, 0
    while share_over < 1:
        optimizer.zero_grad()
        rows = next(batches)
        loss = loss_of(model, *train.pick(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = learning_rate(plan, max(share_over, 1 / plan.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        step, elapsed_s = step + 1, time.monotonic() - started_s
        share_over = min(1.0, max(step / plan.steps, elapsed_s / (60 * plan.minutes)))
        due = int(share_over * EVALUATIONS) > evaluated
        evaluated = int(share_over * EVALUATIONS)
        passes, tokens = step * len(rows) / len(train.tokens), step * len(rows) * train.tokens.shape[1]
        yield Progress(step, share_over, passes, tokens / elapsed_s, loss.detach(), due)


def optimizer_for(model: Any, plan: Plan) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=plan.peak_learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(plan: Plan, share_over: float) -> float:
    """Return the rate: up over the first 2% of the run, then linearly down to zero at its end."""
    return plan.peak_learning_rate * min(share_over / WARM_UP_SHARE, (1 - share_over) / (1 - WARM_UP_SHARE))


def row_batches(windows: int, plan: Plan) -> Iterator[torch.Tensor]:
    """Yield rows of batches from shuffled passes over the windows, without end."""
    generator = torch.Generator().manual_seed(plan.seed)
    size = min(plan.batch_windows, windows)
    while True:
        order = torch.randperm(windows, generator=generator)
        yield from (order[i : i + size].to(plan.device) for i in range(0, windows - size + 1, size))


class Best:
    """The weights with the lowest held-out loss so far."""

    def __init__(self) -> None:
        self.loss = float("inf")
        self.state: dict[str, torch.Tensor] = {}

    def offer(self, model: Any, loss: float) -> None:
        """Keep a copy of the model's weights if they are better."""
        if loss < self.loss:
            self.loss = loss
            self.state = {name: value.detach().clone() for name, value in model.state_dict().items()}


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Save a folder that AutoModelForCausalLM and AutoTokenizer load, weights in bf16."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=512,
        do_sample=True,
        temperature=0.7,
    )
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    for load_option in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(load_option, None)
    tokenizer.save_pretrained(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the corpus unless it exists, train, save, and log the held-out loss."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.corpus or Path(scratch)
        if not (folder / "train.npz").exists():
            make_corpus(
                options.data,
                folder,
                vocabulary=VOCABULARY,
                seed=options.seed,
                made=Made(options.facts, options.calls),
            )
        corpus = load_corpus(folder)
    log.info("%d windows to train on, %d held out", len(corpus.train.tokens), len(corpus.held_out.tokens))
    if options.out is None:
        return
    plan = Plan(
        steps=options.steps,
        minutes=options.minutes,
        batch_windows=options.batch_windows,
        dropout=options.dropout,
        seed=options.seed,
        device=options.device,
        compiled=options.compile,
    )
    model, record = fit(corpus, plan)
    save(model, corpus.tokenizer, options.out)
    (options.out / "training.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    log.info("%d parameters, held-out loss %.4f", model.num_parameters(), record["held_out_loss"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trains Mico's demo model.")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="JSON lines (.xz, .zst, .gz)")
    parser.add_argument("--facts", type=int, default=MADE.facts, help="made-up questions with right answers")
    parser.add_argument("--calls", type=int, default=MADE.calls, help="made-up calls of functions")
    parser.add_argument("--out", type=Path, help="folder for the model; without it only the corpus is made")
    parser.add_argument("--corpus", type=Path, help="folder that keeps tokenizer and tokens between runs")
    parser.add_argument("--steps", type=int, default=DEFAULT_PLAN.steps)
    parser.add_argument("--minutes", type=float, default=DEFAULT_PLAN.minutes)
    parser.add_argument("--batch-windows", type=int, default=DEFAULT_PLAN.batch_windows)
    parser.add_argument("--dropout", type=float, default=DEFAULT_PLAN.dropout)
    parser.add_argument("--seed", type=int, default=DEFAULT_PLAN.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="slower to start, faster to train")
    return parser


if __name__ == "__main__":
    main()
