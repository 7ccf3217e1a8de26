"""The wheel, built and installed outside the checkout: a federation starts from it, answers, and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
WITHIN_S = 300

Mico = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build with the declared backend, which this environment has, so that nothing is downloaded."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=WITHIN_S)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the packages of this one, but not its editable checkout."""
    folder = tmp_path_factory.mktemp("outside") / "environment"
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(pip, check=True, timeout=WITHIN_S)
    # a folder that a .pth names is searched, but a .pth in it, such as the one of the checkout, is not read
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder


@pytest.fixture(scope="module")
def mico(installed: Path) -> Mico:
    outside = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("MICO_", "OPENAI_"))
    }

    def run(*arguments: str, program: str = "mico") -> str:
        command = [str(installed / "bin" / program), *arguments]
        done = subprocess.run(
            command,
            cwd=installed.parent,
            env=outside,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_the_wheel_has_every_file_of_its_packages_and_the_licence(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        stated = archive.read(metadata).decode()
        folder = metadata.removesuffix("METADATA")
        licence = archive.read(f"{folder}licenses/LICENSE").decode()
        notice = archive.read(f"{folder}licenses/NOTICE").decode()
    assert set(tracked.split()) - names == set()
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    assert licence == (ROOT / "LICENSE").read_text()
    assert notice == (ROOT / "NOTICE").read_text()
    assert f"\nVersion: {PROJECT['project']['version']}\n" in stated
    assert "\nLicense-Expression: Apache-2.0\n" in stated


def test_nothing_of_the_checkout_is_imported(installed: Path, mico: Mico) -> None:
    show = f"import {', '.join(PACKAGES)}\nfor package in ({', '.join(PACKAGES)}): print(package.__file__)"
    files = mico("-c", show, program="python").split()
    assert len(files) == len(PACKAGES)
    assert [file for file in files if not Path(file).is_relative_to(installed)] == []
    assert mico("--version").split() == ["mico", PROJECT["project"]["version"]]


def test_a_federation_of_it_starts_answers_and_ends(mico: Mico) -> None:
    facts = json.loads(mico("up", "--detach", "--json", "--port", "0", "--sites", "1"))
    try:
        said = mico("chat", "-q", "Name three rivers.")
        page = httpx.get(facts["base_url"].removesuffix("/v1") + "/admin", timeout=60)
        sites = json.loads(mico("sites", "list", "--json"))
    finally:
        mico("down")
    assert said.strip()
    assert page.status_code == 200
    assert [site["state"] for site in sites] == ["ready"]
