"""Add the lowest schema of a program that may use the tables. Programs of before ask for equality."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
additive = False


def upgrade() -> None:
    op.create_table(
        "schema_floor",
        sa.Column("floor", sa.String, nullable=False),
        sa.Column("made_by", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("floor", name="pk_schema_floor"),
    )


def downgrade() -> None:
    op.drop_table("schema_floor")
