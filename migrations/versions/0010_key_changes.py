"""Number the changes of keys and tenants in `stamp`, so that replicas read only what changed.

A program of before stamps at random; replicas notice that by their fingerprint, and read everything.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
additive = True


def upgrade() -> None:
    op.create_table(
        "change_counters",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_change_counters"),
    )
    op.create_index("ix_keys_stamp", "keys", ["stamp", "revoked_at"])


def downgrade() -> None:
    op.drop_index("ix_keys_stamp", "keys")
    op.drop_table("change_counters")
