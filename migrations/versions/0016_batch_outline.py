"""Add what the lines of a batch are expected to take, how many of them run, and when the batch should end."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
additive = True


def upgrade() -> None:
    op.add_column("batches", sa.Column("outline", sa.JSON(none_as_null=True)))
    op.add_column("batches", sa.Column("in_flight", sa.Integer, nullable=False, server_default="0"))
    op.add_column("batches", sa.Column("ends_at", sa.Double))


def downgrade() -> None:
    op.drop_column("batches", "ends_at")
    op.drop_column("batches", "in_flight")
    op.drop_column("batches", "outline")
