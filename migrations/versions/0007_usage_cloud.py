"""Add the cloud to usage, so that usage adds up by cloud after sites are gone."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
additive = True


def upgrade() -> None:
    op.add_column("usage", sa.Column("cloud", sa.String, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("usage", "cloud")
