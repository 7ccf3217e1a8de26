"""Add site events as each gateway replica saw them, so that they outlive the replica."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
additive = True


def upgrade() -> None:
    op.create_table(
        "site_events",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("site", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("bad", sa.Boolean, nullable=False),
        sa.Column("replica", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_site_events"),
    )
    op.create_index("ix_site_events_at", "site_events", ["at"])
    op.create_index("ix_site_events_newest", "site_events", ["site", "at"])


def downgrade() -> None:
    op.drop_table("site_events")
