"""What a process hides of the installed packages: transformers goes on, and its tokens are the same."""

from __future__ import annotations

import json
import subprocess
import sys

from transformers import AutoTokenizer

from mico.demo_model import FOLDER

TEXT = 'The sum of 12 and 30, said \u00e9t\u00e9 \U0001f600, is {"answer": 42}.'
SITE = """
import json, sys
from site_engine.optional_packages import hide_torch
hide_torch()
from site_engine.engine.loading import grammars_of
from site_engine.native import load_tokenizer
tokenizer, vocabulary = load_tokenizer(sys.argv[1])
ids = tokenizer.encode(sys.argv[2])
grammar = grammars_of(tokenizer, len(tokenizer), (tokenizer.eos_token_id,)).compile("start: %json {}", "")
print(json.dumps([ids, tokenizer.decode(ids), sys.modules["torch"]]))
"""
ENGINE = """
import importlib.util
from site_engine.optional_packages import hide
hide("sklearn", "logging")
print(importlib.util.find_spec("sklearn"))
import logging
try:
    import sklearn
except ModuleNotFoundError:
    print("missing")
"""
FOLLOWER = """
import runpy, socket, sys
leader, follower = socket.socketpair()
leader.close()
sys.argv = ["follower", str(follower.fileno()), "0"]
try:
    runpy.run_module("site_engine.follower_process", run_name="__main__")
except EOFError:
    print([sys.modules.get(name, "not hidden") for name in ("scipy", "sklearn", "boto3")])
"""


def output_of(program: str, *arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout, done.stderr


def test_a_tokenizer_without_torch_says_what_it_says_with_it() -> None:
    told, complaints = output_of(SITE, str(FOLDER), TEXT)
    with_torch = AutoTokenizer.from_pretrained(FOLDER)
    ids = with_torch.encode(TEXT)
    assert json.loads(told) == [ids, with_torch.decode(ids), None]
    assert complaints == ""


def test_a_hidden_package_is_missing_unless_it_is_imported_already() -> None:
    assert output_of(ENGINE)[0].split() == ["None", "missing"]


def test_a_follower_hides_what_its_leader_hides() -> None:
    """All ranks wait for the one that loads last."""
    assert output_of(FOLLOWER)[0] == "[None, None, None]\n"
