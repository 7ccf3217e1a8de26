"""Try every causal model type that transformers knows, as a tiny random model: is it served exactly?

    python -m bench.studies.families [TYPE ...]

Prints a line per type and a summary as JSON; five minutes for all.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.model_families import try_family


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.families", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("types", metavar="TYPE", nargs="*", help="as transformers names it; without one, all")
    types = parser.parse_args().types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    count: Counter[str] = Counter()
    for model_type in types:
        verdict = try_family(model_type)
        count[verdict.kind] += 1
        print(f"{model_type:28s} {verdict.kind:8s} {verdict.detail[:150]}", flush=True)
    print(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__, **count}))
    return 1 if count["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
