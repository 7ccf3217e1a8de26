"""Count the private functions of a package that their module uses exactly once.

`python -m tests.architecture.private_functions [PACKAGE]` prints the count and lists them. A private function
that is used once often reads better in the place of its use, unless its name says what its lines do not.

Does not resolve names: a use of a name counts for every function of that name in the module.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Count:
    functions: int
    used_once: tuple[str, ...]
    """As `file:line name`."""

    @property
    def share(self) -> float:
        return len(self.used_once) / self.functions


def count(package: Path) -> Count:
    """Count the functions and methods of every module below `package`, generated ones left out."""
    functions, once = 0, []
    for file in sorted(package.rglob("*.py")):
        if "_pb2" in file.name:
            continue
        nodes = list(ast.walk(ast.parse(file.read_text())))
        uses = Counter(name for node in nodes if (name := used_name(node)))
        found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        functions += len(found)
        place = file.relative_to(package.parent)
        once += [
            f"{place}:{node.lineno} {node.name}"
            for node in found
            if is_private(node.name) and uses[node.name] == 1
        ]
    return Count(functions, tuple(once))


def used_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


if __name__ == "__main__":
    counted = count(ROOT / (sys.argv[1] if len(sys.argv) > 1 else "site_engine"))
    print("\n".join(counted.used_once))
    print(f"{len(counted.used_once)} of {counted.functions} functions: {counted.share:.1%}")
