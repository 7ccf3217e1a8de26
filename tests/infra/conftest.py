"""Fixtures of Terraform's tests: a copied tree and the stub provider, both initialised once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from infra.terraform.tests.stub_provider import serve
from infra.terraform.tests.workspace import SCHEMAS, Workspace, copy_tree


@pytest.fixture(scope="session")
def terraform() -> str:
    found = shutil.which("terraform")
    if found is None:
        pytest.skip("terraform is not on the PATH: nothing of infra/terraform is checked here")
    return found


@pytest.fixture(scope="session")
def workspace(terraform: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    with serve(SCHEMAS) as environment:
        yield copy_tree(tmp_path_factory.mktemp("stub"), environment)
