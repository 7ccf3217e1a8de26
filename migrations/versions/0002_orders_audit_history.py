"""Add operators' orders, the audit, and a day of history samples for the page."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
additive = True


def upgrade() -> None:
    op.create_table(
        "site_orders",
        sa.Column("site", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("value", sa.String, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("given_at", sa.Double, nullable=False),
        sa.Column("until_at", sa.Double),
        sa.Column("move_at", sa.Double),
        sa.PrimaryKeyConstraint("site", "subject", name="pk_site_orders"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("site", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("before", sa.String, nullable=False),
        sa.Column("after", sa.String, nullable=False),
        sa.Column("until_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_table(
        "history",
        sa.Column("minute", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("sample", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("minute", name="pk_history"),
    )


def downgrade() -> None:
    op.drop_table("history")
    op.drop_table("audit")
    op.drop_table("site_orders")
