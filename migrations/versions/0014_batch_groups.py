"""Add the lines of a batch that begin alike: the group of each, and the tokens that it shares."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
additive = True


def upgrade() -> None:
    op.add_column("batch_lines", sa.Column("group", sa.Integer, nullable=False, server_default="0"))
    op.add_column("batch_lines", sa.Column("shared_tokens", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("batch_lines", "shared_tokens")
    op.drop_column("batch_lines", "group")
