"""Add quotas of tenants and keys, the replicas' slices of quotas, and further rights of keys and tenants."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
additive = True


def upgrade() -> None:
    op.add_column("tenants", sa.Column("best_priority", sa.Integer, nullable=False, server_default="0"))
    op.add_column("tenants", sa.Column("stamp", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("keys", sa.Column("regions", sa.JSON))
    op.add_column("keys", sa.Column("first_id", sa.String))
    op.create_table(
        "quotas",
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("stamp", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("scope", "subject", "kind", name="pk_quotas"),
    )
    op.create_table(
        "replicas",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("boot_id", sa.String, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_replicas"),
    )
    op.create_table(
        "quota_slices",
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("replica", sa.String, nullable=False),
        sa.Column("period", sa.BigInteger, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("used", sa.BigInteger, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
        sa.Column("want", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("scope", "subject", "kind", "replica", name="pk_quota_slices"),
    )


def downgrade() -> None:
    op.drop_table("quota_slices")
    op.drop_table("replicas")
    op.drop_table("quotas")
    op.drop_column("keys", "first_id")
    op.drop_column("keys", "regions")
    op.drop_column("tenants", "stamp")
    op.drop_column("tenants", "best_priority")
