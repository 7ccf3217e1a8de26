"""Test the work that vLLM is given and the reading of its results; a package stands in for vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from bench import blend_gpu, ranks, variants
from bench.blend import Job
from bench.support.beside_vllm import (
    ROOT,
    SETTLED_TOKENS,
    STEP_ROUNDS,
    Pass,
    Served,
    Took,
    error_of,
    limited,
    serve,
    step_passes,
)
from bench.support.http_servers import with_children
from bench.support.offline_work import Line
from bench.tests.variants_test import SHAPE, SMALLEST

ENGINE = """
from types import SimpleNamespace as Values

KNOWN = {"block_size", "enable_lora", "enable_prefix_caching", "gpu_memory_utilization", "max_lora_rank",
         "max_loras", "max_model_len", "max_num_seqs", "num_gpu_blocks_override", "tensor_parallel_size"}
PLAIN = {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "seed": 0}

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and not detokenize and temperature == 0.0
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, **arguments):
        assert PLAIN.items() <= arguments.items() and arguments.keys() - PLAIN.keys() <= KNOWN, arguments
        self.longest, self.adapters = arguments["max_model_len"], arguments.get("max_loras", 0)
        cache = Values(kv_cache_size_tokens=4096)
        self.llm_engine = Values(vllm_config=Values(cache_config=cache))

    def generate(self, prompts, params, use_tqdm, lora_request):
        answers, adapters = [], lora_request or [None] * len(prompts)
        assert len({each.lora_int_id for each in adapters if each}) <= self.adapters
        for prompt, rules, adapter in zip(prompts, params, adapters, strict=True):
            if len(prompt["prompt_token_ids"]) + rules.max_tokens > self.longest:
                raise ValueError("prompt is too long")
            assert adapter is None or adapter.lora_name == f"adapter-{adapter.lora_int_id - 1}"
            cached = 0 if adapter is None else adapter.lora_int_id
            output = Values(token_ids=[0] * rules.max_tokens)
            answers.append(Values(outputs=[output], num_cached_tokens=cached))
        return answers
"""
REQUEST = """
class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        self.lora_name, self.lora_int_id = lora_name, lora_int_id
"""


@pytest.fixture
def packages(tmp_path: Path) -> str:
    """A folder with a package of vLLM's names, as far as the peer uses them."""
    (tmp_path / "vllm/lora").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text(ENGINE)
    (tmp_path / "vllm/lora/request.py").write_text(REQUEST)
    return str(tmp_path)


MODEL, ARGUMENTS = Path("m"), {"max_loras": 2, "max_model_len": 6}
ADAPTERS = ["/adapters/adapter-0", "/adapters/adapter-1"]


def test_passes_go_to_another_process_and_their_times_come_back(packages: str) -> None:
    passes = [Pass("few", [[1, 2], [3]], [4, 1]), Pass("adapters", [[1], [2], [3]], [2, 2, 2], [1, 2, 0])]
    told: list[str] = []
    found = serve(packages, MODEL, ARGUMENTS, passes, ADAPTERS, ended=lambda name, took: told.append(name))
    assert told == ["few", "adapters"]
    assert (found.error, found.kv_tokens) == ("", 4096)
    assert {name: [each.cached_tokens for each in took] for name, took in found.passes.items()} == {
        "few": [0],
        "adapters": [3],
    }


def test_an_error_is_one_line_and_passes_until_then_count(
    packages: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = serve(packages, MODEL, ARGUMENTS, [Pass("few", [[1]], [4]), Pass("long", [[1] * 9], [1])])
    assert found.error == "1: ValueError: prompt is too long"
    assert list(found.passes) == ["few"]
    assert found.figures()["error"] == found.error
    assert "Traceback" in capfd.readouterr().err


def test_without_vllm_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("import not_installed_anywhere")
    found = serve(str(tmp_path), MODEL, {}, [])
    assert found == Served(0.0, 0, {}, "1: ModuleNotFoundError: No module named 'not_installed_anywhere'")


def test_a_process_that_never_ends_is_ended(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("import signal; signal.pause()")
    assert (
        serve(str(tmp_path), MODEL, {}, [], within_s=0.1).error == "not done within 0 s: no error in its log"
    )


def test_vllm_ends_with_the_program_that_has_started_it(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("import signal; print('begun', flush=True); signal.pause()")
    program = "import sys; from pathlib import Path; from bench.support.beside_vllm import serve; "
    command = [sys.executable, "-c", f"{program}serve(sys.argv[1], Path('m'), {{}}, [])", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as parent:
        until(lambda: any("begun" in log.read_text() for log in tmp_path.glob("mico-vllm-*/log")))
        (peer,) = with_children(parent.pid)[1:]
        parent.kill()
    until(lambda: not runs(peer))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition of other processes."""
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_the_last_error_that_is_no_consequence_is_told() -> None:
    log = "\n".join([
        "WARNING ImportError: no flashinfer",
        "(Worker) ERROR [multiproc.py] ValueError: Free memory on device is less than desired",
        "(EngineCore) ERROR Exception: WorkerProc initialization failed due to an exception",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ])  # fmt: skip
    assert error_of(log, "1") == "1: ValueError: Free memory on device is less than desired"
    assert error_of("RuntimeError: Engine core initialization failed.", "1").startswith("1: RuntimeError")


def test_a_step_is_what_longer_answers_take_more() -> None:
    passes = {"8 short": [Took(each, 0) for each in (1.0, 1.1, 9.0)],
              "8 long": [Took(each, 0) for each in (2.1, 2.0, 2.2)]}  # fmt: skip
    served = Served(1.0, 1, passes, "")
    assert served.step_ms("8", 100) == pytest.approx(10.0)
    assert served.step_ms("256", 100) is None


def test_rows_of_steps_have_as_many_of_each_adapter() -> None:
    passes = step_passes("8x4", 32, prompt_tokens=5, steps=10, vocab_size=100, adapters=8)
    assert Counter(passes[-1].adapters) == dict.fromkeys(range(1, 9), 4)
    assert Counter((each.name, *each.tokens[:1]) for each in passes) == {
        ("8x4 warm", SETTLED_TOKENS): 1,
        ("8x4 warm", SETTLED_TOKENS + 10): 1,
        ("8x4 short", SETTLED_TOKENS): STEP_ROUNDS,
        ("8x4 long", SETTLED_TOKENS + 10): STEP_ROUNDS,
    }
    prompts = [tuple(prompt) for each in passes for prompt in each.prompts]
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt) == 5 for prompt in prompts)
    assert step_passes("base", 4, prompt_tokens=5, steps=10, vocab_size=100)[0].adapters == []


def test_room_for_tokens_is_in_blocks_of_which_one_is_not_used() -> None:
    assert limited(75_000)["num_gpu_blocks_override"] == 4688


LINES = [Line(0, 2, 4, 3), Line(1, 2, 3, 9), Line(0, 2, 5, 6)]


def job(how: str) -> Job:
    return Job("documents", how, 0.0, "vLLM's", 1.0, 100, 4, 0, "")


def test_vllm_has_all_lines_of_a_batch_in_each_order() -> None:
    todo = [(job(how), LINES) for how in blend_gpu.VLLM_ORDERS]
    warm, *passes = blend_gpu.vllm_passes(todo, 1000)
    assert sorted(warm.tokens) == [3, 6, 9]
    assert {each.name: each.tokens for each in passes} == {
        "documents, arrival": [3, 9, 6],
        "documents, longest": [9, 6, 3],
        "documents, prefix": [3, 6, 9],
    }
    last = passes[-1].prompts
    assert [len(prompt) for prompt in last] == [4, 5, 3]
    assert last[0][:2] == last[1][:2] != last[2][:2]
    assert passes[0].prompts[0] != last[0]


def test_each_run_is_in_the_file_at_once_and_the_end_too(
    packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, model = tmp_path / "runs.jsonl", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 100}')
    chosen = f"--model {model} --orders --seconds 0.1 --vllm documents --vllm-orders arrival prefix"
    monkeypatch.setattr(
        "sys.argv", ["blend_gpu", *chosen.split(), "--vllm-path", packages, "--out", str(out)]
    )
    blend_gpu.main()
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [run.get("order") for run in runs] == ["arrival", "prefix", None]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == runs


def test_runs_of_vllm_stand_beside_ours() -> None:
    arrival = blend_gpu.vllm_run(job("arrival"), LINES, Took(2.0, 1))
    assert (arrival["took_s"], arrival["tokens_per_s"], arrival["shared"]) == (2.0, 9.0, 0.5)
    told = {"engine": "vLLM", "start_s": 100.0, "kv_tokens": 96, "error": "1: lost"}
    ours = {**arrival, "engine": "Mico", "order": "blend", "took_s": 1.5}
    lines = blend_gpu.table([ours, arrival, told]).splitlines()
    assert [line.split()[1:3] for line in lines[1:3]] == [["Mico", "blend"], ["vLLM", "arrival"]]
    assert lines[3] == "vLLM failed: 1: lost"


def test_ranks_report_steps_and_room_of_vllm(
    packages: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = f"--do vllm,vllm-large --rows 1 2 --prompt 2 --steps 3 --vllm-path {packages}"
    monkeypatch.setattr("sys.argv", ["ranks", "--devices", "cpu,cpu", *chosen.split()])
    assert ranks.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"vllm", "vllm-large"}
    for each in found.values():
        assert each["kv_tokens"] == 4096
        assert isinstance(each["1_ms"], float)
        assert isinstance(each["2_ms"], float)
        assert "error" not in each


def test_variants_report_shares_of_vllm_after_our_engines(
    packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    transformers.LlamaConfig(**SHAPE).save_pretrained(folder)
    chosen = f"--model {folder} --do steps,vllm --vllm-path {packages} {SMALLEST}"
    monkeypatch.setattr("sys.argv", ["variants", *chosen.split()])
    assert variants.main() == 0
    printed = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in printed if line.startswith("{")]
    theirs = [each for each in records if each.get("phase") == "vllm"]
    assert [(each["kv_tokens"], each["slots"]) for each in theirs if "kv_tokens" in each] == [(4096, 2)]
    assert not any("error" in each for each in theirs)
    assert any("Mico, steps: 2 adapters, 4 rows, 2 slots" in line for line in printed)


def test_vllm_has_no_phase_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["variants", "--model", "m", "--do", "vllm,steps"])
    with pytest.raises(SystemExit):
        variants.main()
