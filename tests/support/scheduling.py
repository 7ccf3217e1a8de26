"""Which tests stay with one process of pytest-xdist, so that what they share is started once."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FOLDER = "tests/e2e"
ALONE = {"schema_upgrade_test.py", "secrets_test.py", "upgrade_test.py", "wheel_test.py", "workers_test.py"}
"""They start processes of their own, and can run beside the others."""


class OneFederation(LoadFileScheduling):
    """Share out whole files, and the files of the end-to-end tests' one federation as if they were one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        folder, _, name = file.rpartition("/")
        return folder if folder == FOLDER and name not in ALONE else file
