"""Add what queries and their attempts cost, their prices, and the hours of own sites."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
additive = True

USAGE = ("nano_usd", "cheapest_nano_usd", "dearest_nano_usd")
DECISIONS = ("cached_tokens", "resumed_tokens", "nano_usd")


def upgrade() -> None:
    for name in USAGE:
        op.add_column("usage", sa.Column(name, sa.BigInteger))
    for name in DECISIONS:
        op.add_column("decisions", sa.Column(name, sa.BigInteger))
    op.add_column("decisions", sa.Column("prices", sa.JSON(none_as_null=True)))
    op.create_table(
        "site_hours",
        sa.Column("site", sa.String, nullable=False),
        sa.Column("hour", sa.Double, nullable=False),
        sa.Column("nano_usd_per_hour", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("cloud", sa.String, nullable=False),
        sa.Column("minutes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("site", "hour", "nano_usd_per_hour", name="pk_site_hours"),
    )
    op.create_index("ix_site_hours_hour", "site_hours", ["hour"])


def downgrade() -> None:
    op.drop_table("site_hours")
    op.drop_column("decisions", "prices")
    for name in DECISIONS:
        op.drop_column("decisions", name)
    for name in USAGE:
        op.drop_column("usage", name)
