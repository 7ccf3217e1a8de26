"""One federation for all tests of this folder, ended after them; its logs are shown beside a failure."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.local_federation import LocalFederation
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="package")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[LocalFederation]:
    folder: Path = tmp_path_factory.mktemp("federation")
    started = LocalFederation.start(folder / "mico", write_tiny_model(folder / "tiny"))
    try:
        yield started
    finally:
        started.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fixtures = getattr(item, "funcargs", {})
    if report.failed and isinstance(fixtures.get("federation"), LocalFederation):
        report.sections.append(("the federation's logs", fixtures["federation"].logs()))
    return report
