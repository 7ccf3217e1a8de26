"""Count the spoilt arguments of the pool and network modules that the offline checks notice.

python -m bench.studies.mutants [MODULE ...]     all of them by default; takes minutes; needs terraform
"""

import argparse
import json
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from infra.terraform.tests.mutants import Mutant, Verdict, judge, mutants
from infra.terraform.tests.stub_provider import serve
from infra.terraform.tests.workspace import SCHEMAS, SOURCE, Workspace, copy_tree

MODULES = ("pool-aws", "pool-gcp", "pool-azure", "pool-local", "network-aws", "network-gcp", "network-azure")
WORKERS = 2


class Case:
    """One mutant of one module's file."""

    def __init__(self, folder: str, file: str, mutant: Mutant) -> None:
        self.folder, self.file, self.mutant = folder, file, mutant


def cases(modules: list[str]) -> list[Case]:
    """Yield every mutant of the modules' own files; the contract in each pool has its own tests."""
    found: list[Case] = []
    for module in modules:
        for path in sorted((SOURCE / "modules" / module).glob("*.tf")):
            if not path.is_symlink():
                made = mutants(f"{module}/{path.name}", path.read_text())
                found += [Case(f"modules/{module}", path.name, mutant) for mutant in made]
    return found


def judge_all(found: list[Case], workspaces: list[Workspace]) -> list[Verdict]:
    """Yield a verdict for each case; a workspace is used by one worker at a time."""
    free: SimpleQueue[Workspace] = SimpleQueue()
    for workspace in workspaces:
        free.put(workspace)

    def one(case: Case) -> Verdict:
        workspace = free.get()
        try:
            return judge(workspace, case.folder, case.file, case.mutant)
        finally:
            free.put(workspace)

    with ThreadPoolExecutor(len(workspaces)) as pool:
        return list(pool.map(one, found))


def prepare(folder: Path, environment: dict[str, str], modules: list[str]) -> Workspace:
    """Make a workspace in which every module is initialised."""
    folder.mkdir()
    workspace = copy_tree(folder, environment)
    for module in modules:
        done = workspace.terraform(f"modules/{module}", "init", "-backend=false")
        if done.returncode:
            raise SystemExit(done.stderr)
    return workspace


def main() -> None:
    """Print every mutant that nothing notices, and a last line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "modules", metavar="MODULE", nargs="*", help="without one, all: " + ", ".join(MODULES)
    )
    modules = parser.parse_args().modules or list(MODULES)
    found = cases(modules)
    with tempfile.TemporaryDirectory() as folder, serve(SCHEMAS) as environment:
        workspaces = [prepare(Path(folder, str(n)), environment, modules) for n in range(WORKERS)]
        verdicts = judge_all(found, workspaces)
    for case, verdict in zip(found, verdicts, strict=True):
        if verdict is Verdict.NONE:
            print(f"unnoticed: {case.mutant.label}")
    count = Counter(verdict.value for verdict in verdicts)
    noticed = 1 - count[Verdict.NONE.value] / len(verdicts)
    print(json.dumps({"mutants": len(verdicts), **count, "noticed": round(noticed, 4)}))


if __name__ == "__main__":
    main()
