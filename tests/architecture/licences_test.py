"""Mico may be used under its licence with every dependency of the lock."""

from __future__ import annotations

import tomllib
from email.message import Message

from tests.architecture.licences import PROGRAMS, ROOT, allows, dependencies, stated


def test_every_locked_dependency_has_a_compatible_licence() -> None:
    listed = dependencies()
    assert [each for each in listed if not each.compatible] == []
    absent = [each.name for each in listed if each.licence is None]
    assert len(absent) < len(listed) / 10, f"not installed, so not looked at: {absent}"


def test_only_tools_of_development_are_run_as_programs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    shipped = project["dependencies"] + [need for name in extras if name != "dev" for need in extras[name]]
    assert [need for need in shipped if any(need.startswith(name) for name in PROGRAMS)] == []


def test_an_expression_is_compatible_if_one_alternative_is() -> None:
    assert allows("MIT")
    assert allows("GPL-2.0-only OR MIT AND Apache-2.0")
    assert not allows("MIT AND GPL-3.0-only")
    assert not allows("GPL-3.0-only")
    assert not allows("(MIT OR Apache-2.0) AND MIT")  # unknown to this reading, so it fails and is looked at
    assert not allows("")


def test_a_licence_is_read_from_whichever_field_states_it() -> None:
    assert stated(package(expression="MIT AND PSF-2.0", field="GPL-3.0")) == "MIT AND PSF-2.0"
    assert stated(package(field="Apache 2.0 License")) == "Apache-2.0"
    assert stated(package(field="Copyright of\nothers", classifier="BSD License")) == "BSD-3-Clause"
    assert stated(package(field="MIT License\n\nand its text")) == "MIT"
    assert stated(package(field="see LICENSE", classifier="MIT License")) == "MIT"
    assert stated(package(field="Secret Sauce 1.0")) == "Secret Sauce 1.0"
    assert stated(package()) == ""


def package(expression: str = "", field: str = "", classifier: str = "") -> Message:
    made = Message()
    if expression:
        made["License-Expression"] = expression
    if field:
        made["License"] = field
    if classifier:
        made["Classifier"] = f"License :: OSI Approved :: {classifier}"
    return made


def test_the_licence_file_is_the_official_text_and_the_package_names_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert set(project["license-files"]) == {"LICENSE", "NOTICE"}
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_notice_names_every_card() -> None:
    notice = (ROOT / "NOTICE").read_text()
    assert "mico/demo_model/weights/README.md" in notice
    assert (ROOT / "mico/demo_model/weights/README.md").exists()
    artifacts = [folder for folder in (ROOT / "predictor/artifacts").iterdir() if folder.is_dir()]
    assert [folder.name for folder in artifacts if not (folder / "card.json").exists()] == []
