"""Write the model card: `python -m mico.demo_model.card --model FOLDER --figures FILE`."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from mico.demo_model.data import HELD_OUT_PERCENT, LICENCES
from mico.demo_model.measure import MAX_NEW_TOKENS

SAMPLES = 5

CARD = """\
---
license: cc-by-nc-4.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# mico-demo

A very small language model, so that Mico can be tried without a download or a GPU. **For demonstration only:
it writes recognisable English, nearly always ends its answers, and is usually wrong.** Ask it nothing that
matters, and put any Hub id or model folder in its place.

Llama-shaped: {parameters:,} parameters, 8 layers of width 256, 4 query and 2 key-value heads of 64, context
1,024 tokens, a byte-level BPE vocabulary of 4,096, weights in bf16. Its chat template knows system, user,
assistant and tool messages; a tool's result is shown to it as plain text.

## What it was trained on, and licence

Short, finished English answers (`mico/demo_model/data.py` has the rules) from these public sources, and a few
greetings of our own:

| source | licence as its project states it |
|---|---|
{sources}

Several sources are CC BY-NC, so the weights are under CC BY-NC 4.0: **non-commercial use only**, whatever the
licence of Mico's code. Many answers were written by other models, whose makers' terms may restrict what is
trained on them; Dolly asks to share alike. Sources that state no licence were left out. Rows with e-mail
addresses were dropped; no other search for personal data was made.

## How

`python -m mico.demo_model.train --data FILE --out FOLDER --compile`
`--steps {plan_steps} --minutes {minutes:g} --dropout {dropout} --seed {seed}`

It ended after {steps:,} steps of {batch_tokens:,} tokens, which is {passes:.0f} passes over
{corpus_tokens:.1f} million tokens, at {tokens_per_s:,.0f} tokens/s on one {device}. AdamW, peak learning
rate {rate}, weight decay {decay}. {note}

## Measured

On held-out prompts ({held_out_percent} % of all, chosen by prompt, never trained on): {loss:.3f} nats per
answer token, perplexity {perplexity:.2f}; a token is about 3.3 characters. The same loss chose the best
of the states measured on the way, and near-duplicates in other words may be among the prompts trained on.

{prompts} of these prompts, answered with at most {max_tokens} tokens on the same device:

| temperature | ended by itself | mean tokens | p10 / p50 / p90 / p99 | rank correlation with the reference |
|---|---|---|---|---|
{figures}

The references have {reference_mean:.0f} tokens on average; the rank correlation (Spearman's) is between the
length of the answer and that of its reference. Greedy answers that did not end were loops, so the folder's
generation settings ask for temperature 0.7.

## Samples

The first {samples} prompts of that measurement at temperature {sample_temperature}, unedited.

{answers}
"""


def main() -> None:
    """Write README.md into the model's folder."""
    parser = argparse.ArgumentParser(description="Writes the card of Mico's demo model.")
    parser.add_argument("--model", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--figures", type=Path, required=True, help="file that measure.py wrote")
    parser.add_argument("--note", default="", help="a sentence to add about the training")
    options = parser.parse_args()
    training = json.loads((options.model / "training.json").read_text(encoding="utf-8"))
    runs = json.loads(options.figures.read_text(encoding="utf-8"))["runs"]
    (options.model / "README.md").write_text(card(training, runs, options.note), encoding="utf-8")


def card(training: dict[str, Any], runs: list[dict[str, Any]], note: str) -> str:
    """Return the card's text from the record of the training and the measured runs."""
    plan, shown = training["plan"], runs[-1]
    return CARD.format(
        parameters=training["parameters"],
        sources="\n".join(f"| {source} | {licence} |" for source, licence in LICENCES.items()),
        plan_steps=plan["steps"],
        minutes=plan["minutes"],
        steps=training["steps"],
        dropout=plan["dropout"],
        seed=plan["seed"],
        batch_tokens=plan["batch_windows"] * training["context_tokens"],
        passes=training["passes"],
        corpus_tokens=training["windows"] * training["context_tokens"] / 1e6,
        tokens_per_s=training["tokens_per_s"],
        device=training["device"],
        rate=plan["peak_learning_rate"],
        decay=plan["weight_decay"],
        note=note,
        held_out_percent=HELD_OUT_PERCENT,
        max_tokens=MAX_NEW_TOKENS,
        loss=training["held_out_loss"],
        perplexity=math.exp(training["held_out_loss"]),
        prompts=shown["prompts"],
        figures="\n".join(_figures_row(run) for run in runs),
        reference_mean=shown["reference_mean_tokens"],
        samples=SAMPLES,
        sample_temperature=shown["temperature"],
        answers="\n\n".join(_sample(answer) for answer in shown["answers"][:SAMPLES]),
    )


def _figures_row(run: dict[str, Any]) -> str:
    percentiles = " / ".join(f"{value:.0f}" for value in run["percentile_tokens"].values())
    temperature = f"{run['temperature']:g}" if run["temperature"] else "0 (greedy)"
    return (
        f"| {temperature} | {run['ended_share']:.1%} | {run['mean_tokens']:.0f} | {percentiles} "
        f"| {run['spearman_with_reference']:.2f} |"
    )


def _sample(answer: dict[str, Any]) -> str:
    prompt, text = _quoted(answer["prompt"]), _quoted(answer["answer"])
    return f"**Prompt**\n\n{prompt}\n\n**Answer** ({answer['tokens']} tokens)\n\n{text}"


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    main()
