"""Add the sessions of the page that were ended by signing out: their cookies are void on every replica."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
additive = True


def upgrade() -> None:
    op.create_table(
        "ended_sessions",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ended_sessions"),
    )


def downgrade() -> None:
    op.drop_table("ended_sessions")
