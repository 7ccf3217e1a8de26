"""One federation for all tests of this folder, ended after them; its logs are shown beside a failure.

`page` is the operator's page in a browser.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, find_chromium
from tests.support.local_federation import LocalFederation
from tests.support.page_scripts import row
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="package")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Generator[LocalFederation]:
    folder: Path = tmp_path_factory.mktemp("federation")
    started = LocalFederation.start(folder / "mico", write_tiny_model(folder / "tiny"))
    try:
        yield started
    finally:
        started.end()


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        reporter = request.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("NOT TESTED: the page in a browser. apt-get install chromium", red=True)
        pytest.skip("no Chromium on this machine")
    with Browser(program, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(browser: Browser, federation: LocalFederation) -> Browser:
    """The page, signed in, with its first figures."""
    federation.wait_until_ready()
    browser.open("about:blank")  # the page of the test before would go on asking, without its cookie
    browser.complaints.clear()
    browser.requested.clear()
    browser.call("Network.clearBrowserCookies")
    browser.size(1440, 1000)
    browser.open(federation.base_url.removesuffix("/v1") + "/admin")
    browser.until("document.querySelector('#sign-in').open", "the page asks for a key")
    browser.type("#key", federation.api_key)
    browser.key("Enter", 13)
    browser.until(" && ".join(row(each.name) for each in federation.running.sites), "every site")
    return browser


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fixtures = getattr(item, "funcargs", {})
    if report.failed and isinstance(fixtures.get("federation"), LocalFederation):
        report.sections.append(("the federation's logs", fixtures["federation"].logs()))
    return report
