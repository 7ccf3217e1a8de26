"""Add the tokens that the answers of a batch took."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
additive = True


def upgrade() -> None:
    op.add_column("batches", sa.Column("usage", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    op.drop_column("batches", "usage")
