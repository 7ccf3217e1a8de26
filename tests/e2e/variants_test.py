"""Three sites of one base: queries go where the variant is, and to the next site when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from mico.local.plan import to_toml
from tests.support.browser import Browser, find_chromium
from tests.support.local_federation import LocalFederation, eventually, mico_here
from tests.support.site_process import start_site
from tests.support.tiny_model import write_tiny_model
from tests.support.variants import fine_tuned, lora

pytestmark = pytest.mark.e2e

PROMPTS = ("Why is the sky blue?", "Bread and salt", "A line about rivers.")
TOKENS = 16
ROOT = Path(__file__).parents[2]


@contextmanager
def site(
    federation: LocalFederation, folder: Path, name: str, groups: str = "", **variants: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a site of the base with adapters, or of other groups, by the commands that deployments use."""
    known = tomllib.loads(federation.folder.config(federation.running.sites[0].name).read_text())
    settings = {key: known[key] for key in ("gateways", "token_file")}
    settings |= {"site": name, "slots": 4, "device": "cpu", "threads": 1}
    text = to_toml({**settings, "models_from": [str(folder / "zoo")]})
    if not groups:
        text += f'\n[[group]]\nname = "g"\nmodel = "{folder / "base"}"\nserved_model = "shared-base"\n'
        text += "kv_tokens = 2048\n"
    for variant, kind in variants.items():
        text += f'[[group.variant]]\nid = "{variant}"\n{kind} = "{folder / "zoo" / variant}"\n'
    text += groups
    config = folder / f"{name}.toml"
    config.write_text(text)
    process = start_site(config, folder / f"{name}.log")
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def expected(folder: Path, model: Any) -> list[str]:
    """Return the greedy answers of a model alone, adapter unmerged, in transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        answers.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def ask(federation: LocalFederation, model: str) -> tuple[list[str], set[str]]:
    """Return the greedy answers of a model, and the sites that gave them."""
    answers, sites = [], set()
    with federation.sdk() as sdk:
        for prompt in PROMPTS:
            raw = sdk.completions.with_raw_response.create(
                model=model, prompt=prompt, max_tokens=TOKENS, temperature=0
            )
            answers.append(raw.parse().choices[0].text)
            sites.add(str(raw.headers["x-mico-site"]))
    return answers, sites


def listed(federation: LocalFederation, field: str) -> dict[str, Any]:
    """Return a field of every model that a client finds."""
    with federation.sdk() as sdk:
        return {each.id: each.to_dict()[field] for each in sdk.models.list().data}


def served(federation: LocalFederation) -> dict[str, set[str]]:
    return {
        name: set(each["models"]) for name, each in federation.sites().items() if each["state"] == "ready"
    }


def test_queries_go_where_the_variant_is_and_to_the_next_site_when_one_is_lost(
    federation: LocalFederation, tmp_path: Path
) -> None:
    import transformers

    write_tiny_model(tmp_path / "base")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    alone = {
        "shared-base": plain,
        "support": lora(tmp_path / "zoo" / "support", plain, rank=4, seed=1).alone,
        "legal": lora(tmp_path / "zoo" / "legal", plain, rank=8, seed=2).alone,
        "sales": fine_tuned(
            tmp_path / "zoo" / "sales", plain, lambda name: ".layers.1." in name, seed=3
        ).alone,
    }
    answers = {name: expected(tmp_path, model) for name, model in alone.items()}
    assert len({tuple(each) for each in answers.values()}) == 4, "the variants do nothing"
    with ExitStack() as stack:
        stack.enter_context(site(federation, tmp_path, "v1", support="adapter"))
        lost = stack.enter_context(site(federation, tmp_path, "v2", legal="adapter", sales="model"))
        stack.enter_context(site(federation, tmp_path, "v3"))
        wanted = {
            "v1/g": {"shared-base", "support"},
            "v2/g": {"shared-base", "legal", "sales"},
            "v3/g": {"shared-base"},
        }
        eventually(lambda: wanted.items() <= served(federation).items(), "three sites with their variants")
        parents = listed(federation, "parent")
        assert [parents[name] for name in alone] == [None, "shared-base", "shared-base", "shared-base"]
        assert ask(federation, "support") == (answers["support"], {"v1/g"})
        assert ask(federation, "legal") == (answers["legal"], {"v2/g"})
        assert ask(federation, "sales") == (answers["sales"], {"v2/g"})
        assert ask(federation, "shared-base")[0] == answers["shared-base"]
        show_page(federation, tmp_path)

        mico_here(federation.folder.path, "models", "sleep", "v2/g", "sales", "--reason", "quiet")
        eventually(lambda: state_of(federation, "sales") == "sleeping", "it sleeps")
        assert "sleeping" in mico_here(federation.folder.path, "models", "show", "v2/g")
        assert ask(federation, "sales") == (answers["sales"], {"v2/g"})  # the first query wakes it
        eventually(lambda: state_of(federation, "sales") == "ready", "it is awake")

        folder, legal = federation.folder.path, str(tmp_path / "zoo" / "legal")
        order = ("models", "add", "v3/g", "legal", "--reason", "a second site", "--adapter")
        mico_here(folder, *order, legal)
        eventually(lambda: "legal" in served(federation).get("v3/g", ()), "v3 serves it, too")
        shown = mico_here(folder, "models", "show", "v3/g")
        assert "legal" in shown and "MB" in shown

        def answered_where_it_is_awake() -> bool:
            mico_here(folder, "models", "sleep", "v3/g", "legal", "--reason", "v2 has it awake")
            texts, sites = ask(federation, "legal")
            assert texts == answers["legal"]
            return sites == {"v2/g"}

        eventually(answered_where_it_is_awake, "v2 answers, as soon as its reports are not late")
        os.kill(lost.pid, signal.SIGKILL)
        eventually(lambda: "v2/g" not in served(federation), "the site is lost")
        assert ask(federation, "legal") == (answers["legal"], {"v3/g"})  # which brings it back for the query

        refused = mico_fails(folder, *order[:3], "evil", *order[4:], "/etc")
        assert "is not below models_from of this site" in refused
        mico_here(folder, "models", "remove", "v1/g", "support", "--reason", "over")
        eventually(lambda: served(federation).get("v1/g") == {"shared-base"}, "it is removed")
        # a gateway that has just started answers 503: a site that serves it may still join
        with federation.sdk(max_retries=30) as sdk, pytest.raises(NotFoundError):
            sdk.completions.create(model="support", prompt=PROMPTS[0], max_tokens=TOKENS)
        audit = mico_here(folder, "audit")
        assert "add model legal" in audit and "remove model support" in audit
    federation.wait_until_idle()


def show_page(federation: LocalFederation, folder: Path) -> None:
    """See the variants on the page, where there is a browser."""
    program = find_chromium()
    if program is None:
        return
    with Browser(program, folder / "browser") as page:
        page.open(federation.base_url.removesuffix("/v1") + "/admin")
        page.until("document.querySelector('#sign-in').open", "the page asks for a key")
        page.type("#key", federation.api_key)
        page.key("Enter", 13)
        page.until("document.querySelector('#models-section')?.checkVisibility()", "the section of models")
        choice = "document.querySelector('#models-site')"
        page.run(f"{choice}.value = 'v2/g'; {choice}.onchange()")
        page.until("document.querySelectorAll('#models-section tbody tr').length === 3", "its models")
        rows = page.text("#models-section tbody").splitlines()
        assert rows[0].startswith("shared-base") and "base" in rows[0]
        assert {each.split()[0] for each in rows[1:]} == {"legal", "sales"}
        assert "2 on the device · base " in page.text("#models-section p")
        assert page.complaints == []


def state_of(federation: LocalFederation, model: str) -> str:
    return str(listed(federation, "state")[model])


def test_two_bases_in_one_process_answer_as_they_do_alone(
    federation: LocalFederation, tmp_path: Path
) -> None:
    import transformers

    answers = {}
    groups = ""
    for seed, name in enumerate(("one-base", "other-base")):
        folder = tmp_path / name
        write_tiny_model(folder / "base", seed=seed)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "base").eval()
        answers[name] = expected(folder, plain)
        variant = f"{name}-support"
        answers[variant] = expected(folder, lora(tmp_path / "zoo" / variant, plain, rank=4, seed=seed).alone)
        groups += f'\n[[group]]\nname = "{name}"\nmodel = "{folder / "base"}"\nserved_model = "{name}"\n'
        groups += f'kv_tokens = 2048\n[[group.variant]]\nid = "{variant}"\n'
        groups += f'adapter = "{tmp_path / "zoo" / variant}"\n'
    with site(federation, tmp_path, "two", groups) as process:
        wanted = {f"two/{name}": {name, f"{name}-support"} for name in ("one-base", "other-base")}
        eventually(lambda: wanted.items() <= served(federation).items(), "two groups with their variants")
        found = {name: ask(federation, name) for name in answers}
        assert {name: texts for name, (texts, _) in found.items()} == answers
        assert found["one-base-support"][1] == {"two/one-base"}
        process.terminate()
        assert process.wait(60) == 0
    federation.wait_until_idle()


def mico_fails(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mico", "--folder", str(folder), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert run.returncode != 0
    return run.stderr
