"""Measure what a JSON schema costs: an iteration with guided rows beside one with none.

`python -m bench.studies.guided --rows 32`
The demo model, greedy; every answer is cut before its schema ends. Kinds of batches take turns. `masks` is
the time to compute the masks of all rows, `apply` to compute and to apply them, both also for a large
vocabulary: of made-up words, or that of `--tokenizer`. `limited` is the time of all masks of a string of at
most 40 characters, by the characters that are left, with llguidance's default slices and with those that a
site uses. Large schemas are compiled, or refused. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from site_engine.core.request import Request, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import NotServed
from site_engine.model.grammar_bitmask import WORD_BITS, GrammarBitmask
from site_engine.model.loader import LoadedModel, load
from site_engine.text.grammar import SLICES, Grammar, Grammars
from site_engine.text.tool_grammar import guided_source

MODEL = Path(__file__).parents[2] / "mico/demo_model/weights"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 40},
        "age": {"type": "integer"},
        "kind": {"enum": ["friend", "colleague", "stranger"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
MAX_CHARS = 40
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}


def grammar_of(grammars: Grammars) -> Grammar:
    return grammars.compile(guided_source(PEOPLE, None, None, grammars.literal), "response_format")


def steps(
    model: LoadedModel, grammar: Grammar, rows: int, guided: int, tokens: int
) -> Iterator[tuple[float, float]]:
    """Return (wall, CPU of all threads) seconds of every full decode iteration."""
    engine = packed_engine(model, EngineSettings(slots=rows), time.perf_counter)
    for row in range(rows):
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = Request(str(row), [7 + row, 5, 9], sampling)
        request.grammar = grammar if row < guided else None
        engine.submit(request)
    while engine.has_work:
        wall, cpu = time.perf_counter(), time.process_time()
        if len(engine.step()) == rows:
            yield time.perf_counter() - wall, time.process_time() - cpu


def masks_ms(grammars: Grammars, vocab_size: int, rows: int) -> dict[str, float]:
    """Time the masks in the middle of strings and between them, as rows are."""
    grammar = grammar_of(grammars)
    requests = []
    for row, text in zip(range(rows), _beginnings(), strict=False):
        request = Request(str(row), [0], Sampling())
        request.row, request.guide = row, grammar.start()
        request.guide.matcher.try_consume_tokens(grammars._tokens.tokenize_str(text))
        requests.append(request)
    masks = GrammarBitmask(rows, vocab_size)
    logits = torch.zeros(rows, vocab_size)
    every = range(rows)

    return {
        "masks": _median_ms(lambda: masks.allowed(requests, every)),
        "apply": _median_ms(lambda: masks.allow(requests, every, logits)),
    }


def limited_ms(tokenizer: Any) -> dict[str, Any]:
    """Time the masks of a string of at most MAX_CHARS characters, one of which comes with each token."""
    backend = tokenizer.backend_tokenizer.to_str()
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": MAX_CHARS}}}
    source = guided_source({**schema, "required": ["a"]}, None, None, json.dumps)
    return {
        name: _limited_ms(backend, tokenizer.eos_token_id, slices, source)
        for name, slices in (("default", LLTokenizer.general_slices()), ("used", SLICES))
    }


def _limited_ms(backend: str, end: int, slices: list[str], source: str) -> dict[str, float]:
    began_s = time.perf_counter()
    tokens = LLTokenizer(backend, eos_token=end, slices=slices)
    read_s = time.perf_counter() - began_s
    beginning, one = tokens.tokenize_str('{"a": "'), tokens.tokenize_str("a")
    assert len(one) == 1
    mask = np.zeros(-(-tokens.vocab_size // WORD_BITS), np.int32)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(source), log_level=0)
    fastest = [float("inf")] * (MAX_CHARS + 1)
    for _ in range(7):
        at = matcher.deep_copy()
        assert at.try_consume_tokens(beginning) == len(beginning)
        for left in reversed(range(MAX_CHARS + 1)):
            began_s = time.perf_counter()
            at.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            fastest[left] = min(fastest[left], time.perf_counter() - began_s)
            assert not left or at.consume_token(one[0])
    return {
        "read": round(read_s * 1e3),
        "0 to 10 left": round(sum(fastest[:11]) * 1e3, 2),
        "11 to 30 left": round(sum(fastest[11:31]) * 1e3, 2),
        "31 to 40 left": round(sum(fastest[31:]) * 1e3, 2),
    }


def _beginnings() -> Iterator[str]:
    whole = '[{"name": "Ada Lovelace", "age": 36, "kind": "friend"}, {"name": "Bo'
    while True:
        yield from (whole[:cut] for cut in range(1, len(whole), 3))


def _median_ms(work: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    once()
    return round(statistics.median(once() for _ in range(30)) * 1e3, 3)


def large_tokenizer(words: int) -> Any:
    """Make a byte-level tokenizer with made-up words of 2 to 12 letters, half of them after a space."""
    rnd = random.Random(0)
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(vocabulary) < words:
        word = "".join(rnd.choices("etaoinshrdlucmfwypvbgk", k=rnd.randint(2, 12)))
        vocabulary.setdefault(rnd.choice(("", "Ġ")) + word, len(vocabulary))
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>")


def compiling(grammars: Grammars) -> dict[str, str]:
    """Return CPU milliseconds to compile, or to refuse, an object with `count` optional properties, which
    cost most.
    """
    took = {}
    for count in (500, 1_000, 2_000, 4_000, 8_000):
        properties = {f"p_{number}": {"type": "string"} for number in range(count)}
        source = guided_source({"type": "object", "properties": properties}, None, None, grammars.literal)
        began, refused = time.thread_time(), ""
        try:
            grammars.compile(source, "response_format")
        except NotServed:
            refused = " refused"
        took[str(count)] = f"{(time.thread_time() - began) * 1e3:.0f}{refused}"
    return took


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = load(str(MODEL))
    began = time.perf_counter()
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    made_ms = (time.perf_counter() - began) * 1e3
    began = time.perf_counter()
    grammar = grammar_of(grammars)
    compiled_ms = (time.perf_counter() - began) * 1e3
    kinds = {"plain": 0, "one guided": 1, "half guided": options.rows // 2, "all guided": options.rows}
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.repeat):
        for kind, guided in kinds.items():
            taken[kind] += steps(model, grammar, options.rows, guided, options.tokens)
    large = (
        transformers.AutoTokenizer.from_pretrained(options.tokenizer)
        if options.tokenizer
        else large_tokenizer(options.vocabulary)
    )
    large_grammars = Grammars(large, len(large), ())
    return {
        "step_ms": {kind: _both(found) for kind, found in taken.items()},
        "alone_ms": {
            str(model.vocab_size): masks_ms(grammars, model.vocab_size, options.rows),
            str(len(large)): masks_ms(large_grammars, len(large), options.rows),
        },
        "limited_ms": limited_ms(large),
        "load_tokenizer_ms": round(made_ms, 1),
        "compile_ms": round(compiled_ms, 2),
        "compile_optional_cpu_ms": {
            str(model.vocab_size): compiling(grammars),
            str(len(large)): compiling(large_grammars),
        },
        "conditions": {
            "model": "demo",
            **{name: getattr(options, name) for name in ("rows", "tokens", "repeat", "threads")},
            "torch": torch.__version__,
            "processor": platform.machine(),
        },
    }


def _both(found: list[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = zip(*found, strict=True)
    tenth = sorted(wall)[len(wall) // 10]
    return {
        "wall": round(statistics.median(wall) * 1e3, 2),
        "wall_fastest_tenth": round(tenth * 1e3, 2),
        "cpu": round(statistics.median(cpu) * 1e3, 2),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.studies.guided", description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=80, help="of each answer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--vocabulary", type=int, default=128_000, help="words of the large vocabulary")
    parser.add_argument("--tokenizer", help="a folder or name whose vocabulary is the large one")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = measure(options)
    if not options.json:
        for kind, took in found["step_ms"].items():
            print(f"{kind:12} {took['wall']} ms an iteration, {took['cpu']} ms of CPU")
        for vocabulary, took in found["alone_ms"].items():
            print(f"{vocabulary} tokens: masks {took['masks']} ms, to apply them {took['apply']} ms")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
