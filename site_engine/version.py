"""The version that this process reports."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    try:
        return version("mico")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
