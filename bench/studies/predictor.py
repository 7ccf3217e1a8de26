"""Measure the cost of a forecast: python -m bench.studies.predictor [NAME …], shipped artifacts on one core.

Prints its conditions, a line for each artifact, and the same as one JSON line. Times are of whole forecasts,
from text to distribution; beside the median stand the least and the median of processor time, which other
work on the machine disturbs less.
`bench/studies/adaptation.py` measures what a model learns from 200 answers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from predictor.artifact import SHIPPED, VOCABULARY_FILE
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.wordpiece import WordPieceTokenizer

SENTENCE = "write a detailed essay about the history of printing and say how it changed what people read"
WORDS = SENTENCE.split()
TOKENS = 64
BATCHES = (1, 16, 64)
ROUNDS = 200


def main() -> None:
    shipped = sorted(path.name for path in SHIPPED.iterdir() if path.is_dir())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"some of {', '.join(shipped)}")
    names = parser.parse_args().names or shipped
    if unknown := sorted({*names} - {*shipped}):
        parser.error(f"no artifact is called {', '.join(unknown)}; there are {', '.join(shipped)}")
    conditions = {
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "tokens": TOKENS,
        "rounds": ROUNDS,
    }
    print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    found = {name: measured(name) for name in names}
    for name, figures in found.items():
        print(name, ", ".join(f"{key} {value}" for key, value in figures.items()))
    print(json.dumps({"conditions": conditions, "artifacts": found}))


def measured(name: str) -> dict[str, float]:
    """Return seconds to load, added megabytes, and milliseconds a query by batch size."""
    memory = resident_mb()
    began = time.perf_counter()
    forecaster = OnnxForecaster(SHIPPED / name)
    figures = {"load_s": round(time.perf_counter() - began, 3)}
    for size in BATCHES:
        queries = [Features(text, "mico-demo") for text in texts(size)]
        rounds = [timed(forecaster, queries) for _ in range(max(20, ROUNDS // size))]
        times, spent = (1e3 * np.array(each) / size for each in zip(*rounds, strict=True))
        figures[f"ms_median_{size}"] = round(float(np.median(times)), 3)
        figures[f"ms_least_{size}"] = round(float(times.min()), 3)
        figures[f"ms_processor_{size}"] = round(float(np.median(spent)), 3)
    figures["memory_mb"] = round(resident_mb() - memory, 1)
    figures["artifact_mb"] = round(sum(file.stat().st_size for file in (SHIPPED / name).iterdir()) / 1e6, 1)
    texts_alone = texts(BATCHES[1])
    reading = [timed_reading(forecaster, texts_alone) / len(texts_alone) for _ in range(ROUNDS // BATCHES[1])]
    figures["ms_least_reading_16"] = round(1e3 * min(reading), 3)
    return figures


def timed_reading(forecaster: OnnxForecaster, asked: Sequence[str]) -> float:
    """Return seconds from texts to the graph's input: words, word pieces, counts."""
    began = time.perf_counter()
    forecaster.encode(asked)
    return time.perf_counter() - began


def timed(forecaster: OnnxForecaster, queries: Sequence[Features]) -> tuple[float, float]:
    """Return seconds that passed, and seconds that this thread had a processor."""
    began, spent = time.perf_counter(), time.thread_time()
    forecaster.forecast(queries)
    return time.perf_counter() - began, time.thread_time() - spent


def texts(count: int) -> list[str]:
    """Return different texts of TOKENS word pieces each."""
    random = np.random.default_rng(5)
    vocabulary = next(iter(SHIPPED.glob(f"*/{VOCABULARY_FILE}")), None)
    if vocabulary is None:
        return [" ".join(random.choice(WORDS, TOKENS)) for _ in range(count)]
    pieces = WordPieceTokenizer(vocabulary.read_text("utf-8").split("\n"))
    return [_of_length(pieces, random) for _ in range(count)]


def _of_length(pieces: WordPieceTokenizer, random: np.random.Generator) -> str:
    text = ""
    while len(pieces.encode(text)) < TOKENS:
        text = f"{text} {random.choice(WORDS)}"
    return text


def resident_mb() -> float:
    """Return resident memory now on Linux, else the peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
