"""Write the program of tomorrow: a copy of this one whose schema is one additive migration ahead."""

from __future__ import annotations

import shutil
from pathlib import Path

from gateway.store.tables import SCHEMA

ROOT = Path(__file__).parents[2]
AHEAD = f"{int(SCHEMA) + 1:04d}"
NOTE = "written by tomorrow's program"

_REVISION = f'''"""Add a note to every usage row, and a table that today's program does not know."""

import sqlalchemy as sa
from alembic import op

revision = "{AHEAD}"
down_revision = "{SCHEMA}"
additive = True


def upgrade() -> None:
    op.add_column("usage", sa.Column("note", sa.String, nullable=False, server_default=""))
    op.create_table("notes", sa.Column("id", sa.String, nullable=False), sa.PrimaryKeyConstraint("id"))


def downgrade() -> None:
    op.drop_table("notes")
    op.drop_column("usage", "note")
'''


def write_next_program(folder: Path) -> Path:
    """Write the program into `folder`, for PYTHONPATH, and return the folder.

    The bytecode of what stays the same is copied with it, except what another process is writing just now.
    """
    for package in ("gateway", "migrations"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.pyc.*"))
    for package in ("mico", "predictor", "wire"):
        (folder / package).symlink_to(ROOT / package)
    tables = folder / "gateway/store/tables.py"
    _replace(tables, f'SCHEMA: Final = "{SCHEMA}"', f'SCHEMA: Final = "{AHEAD}"')
    cloud = '    Column("cloud", String, nullable=False, server_default=""),'
    _replace(tables, cloud, f'{cloud}\n    Column("note", String, nullable=False, server_default=""),')
    _replace(
        folder / "gateway/store/rows.py",
        '    cloud: str = ""\n',
        f'    cloud: str = ""\n    note: str = "{NOTE}"\n',
    )
    (folder / f"migrations/versions/{AHEAD}_notes.py").write_text(_REVISION)
    return folder


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
    file.write_text(text.replace(old, new))
