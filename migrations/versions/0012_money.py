"""Add what queries and their attempts cost, and the prices of these, in nano-dollars."""

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


def downgrade() -> None:
    op.drop_column("decisions", "prices")
    for name in DECISIONS:
        op.drop_column("decisions", name)
    for name in USAGE:
        op.drop_column("usage", name)
