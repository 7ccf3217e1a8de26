"""Measure a trained demo model on held-out prompts: `python -m mico.demo_model.measure --model FOLDER ...`.

Writes a JSON file with the figures and every answer, from which the model card is made.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer

from mico.demo_model import functions
from mico.demo_model.corpus import ANSWER, as_chat, encode
from mico.demo_model.data import Exchange, is_looping

MAX_NEW_TOKENS = 512
MAX_PROMPT_TOKENS = 500
TEMPERATURES = (0.0, 0.7)
MAX_CALL_TOKENS = 160
CALLS_SEED = 1_000_003
"""Far from the seeds of trainings: hardly any request was seen there."""


def main() -> None:
    """Answer a sample of held-out prompts at each temperature and write the results."""
    parser = argparse.ArgumentParser(description="Measures Mico's demo model on held-out prompts.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True, help="held_out.jsonl of the corpus folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--calls", type=int, default=500, help="held-out calls of each kind")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(options.model).to(options.device).eval()
    exchanges = sample_prompts(options.held_out, tokenizer, options.prompts)
    everything = sample_prompts(options.held_out, tokenizer, 1 << 30)
    document = {
        "device": options.device,
        "nats_per_character": nats_per_character(model, tokenizer, everything),
        "calls": {
            name: right_calls(model, tokenizer, list(held_out_calls(options.calls, invented)), options.batch)
            for name, invented in (("known", 0.0), ("invented", 1.0))
        },
        "runs": [measure(model, tokenizer, exchanges, each, options.batch) for each in TEMPERATURES],
    }
    options.out.write_text(json.dumps(document, indent=1), encoding="utf-8")


def nats_per_character(model: Any, tokenizer: Any, exchanges: list[Exchange]) -> float:
    """Return the loss of the answers and their ends by character, which vocabularies do not change."""
    total = 0.0
    for exchange in exchanges:
        (document,) = encode(tokenizer, [as_chat([exchange])])
        ids = torch.tensor([document.tokens], device=model.device)
        with torch.inference_mode():
            logits = model(ids).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        answers = torch.tensor(document.scores[1:], device=model.device) == ANSWER
        total += float(losses[answers].sum())
    return total / sum(len(exchange.answer) + 1 for exchange in exchanges)


def held_out_calls(count: int, invented: float) -> Iterator[functions.Chat]:
    """Yield conversations that end with calls, among one to four functions, drawn with another seed."""
    rng = random.Random(CALLS_SEED)
    for _ in range(count):
        use = functions.draw_use(rng, invented)
        tools = functions.offered_with([use], rng.randint(0, 3), rng)
        messages: list[functions.Message] = [
            {"role": "user", "content": use.request},
            {"role": "assistant", "tool_calls": [functions.call_of(use)]},
        ]
        yield functions.Chat(messages, tools)


def right_calls(model: Any, tokenizer: Any, chats: list[functions.Chat], batch: int) -> float:
    """Return the share of conversations whose next turn is exactly the call that it should be, greedily."""
    right = 0
    for start in range(0, len(chats), batch):
        part = chats[start : start + batch]
        texts = [
            tokenizer.apply_chat_template(
                chat.messages[:-1], tools=chat.tools, tokenize=False, add_generation_prompt=True
            )
            for chat in part
        ]
        prompts = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt").to(
            model.device
        )
        written = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_CALL_TOKENS)
        for chat, tokens in zip(part, written[:, prompts["input_ids"].shape[1] :].tolist(), strict=True):
            end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
            wanted = [call["function"] for call in chat.messages[-1]["tool_calls"]]
            right += calls_of(tokenizer.decode(tokens[:end])) == wanted
    return right / len(chats)


def calls_of(text: str) -> list[Any] | None:
    """Return the calls of an answer that is nothing else, None for any other answer."""
    parts = [part.strip() for part in text.split("<tool_call>")]
    try:
        return [json.loads(part.removesuffix("</tool_call>")) for part in parts[1:]] if not parts[0] else None
    except ValueError:
        return None


def sample_prompts(held_out: Path, tokenizer: Any, count: int) -> list[Exchange]:
    """Draw distinct held-out prompts with a fixed seed."""
    lines = held_out.read_text(encoding="utf-8").splitlines()
    exchanges = [Exchange(**json.loads(line)) for line in lines]
    distinct = {exchange.prompt: exchange for exchange in exchanges}
    short = [e for e in distinct.values() if token_count(tokenizer, e.prompt) <= MAX_PROMPT_TOKENS]
    return random.Random(0).sample(short, min(count, len(short)))


def token_count(tokenizer: Any, text: str) -> int:
    """Return the number of tokens of the bare text."""
    return len(tokenizer.encode(text, add_special_tokens=False))


def measure(
    model: Any, tokenizer: Any, exchanges: list[Exchange], temperature: float, batch: int
) -> dict[str, Any]:
    """Return the answers at one temperature (0 is greedy) and statistics of their lengths."""
    torch.manual_seed(0)
    answers = [
        answer
        for start in range(0, len(exchanges), batch)
        for answer in answer_batch(model, tokenizer, exchanges[start : start + batch], temperature)
    ]
    lengths = np.array([len(tokens) for tokens in answers])
    references = [token_count(tokenizer, exchange.answer) for exchange in exchanges]
    return {
        "temperature": temperature,
        "prompts": len(exchanges),
        "ended_share": float((lengths < MAX_NEW_TOKENS).mean()),
        "looping_share": sum(is_looping(tokenizer.decode(tokens)) for tokens in answers) / len(answers),
        "mean_tokens": float(lengths.mean()),
        "percentile_tokens": {p: float(np.percentile(lengths, p)) for p in (10, 50, 90, 99)},
        "reference_mean_tokens": float(np.mean(references)),
        "spearman_with_reference": float(spearmanr(lengths, references).statistic),
        "answers": [
            {
                "source": e.source,
                "prompt": e.prompt,
                "answer": tokenizer.decode(tokens),
                "tokens": len(tokens),
            }
            for e, tokens in zip(exchanges, answers, strict=True)
        ],
    }


def answer_batch(
    model: Any, tokenizer: Any, exchanges: list[Exchange], temperature: float
) -> Iterator[list[int]]:
    """Yield the tokens of each answer without the end token, MAX_NEW_TOKENS of them if it did not end."""
    turns = [[{"role": "user", "content": exchange.prompt}] for exchange in exchanges]
    prompts = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    temperature_options = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    )
    written = model.generate(**prompts, **temperature_options, max_new_tokens=MAX_NEW_TOKENS)
    for tokens in written[:, prompts["input_ids"].shape[1] :].tolist():
        end = tokens.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in tokens else len(tokens)
        yield tokens[:end]


if __name__ == "__main__":
    main()
