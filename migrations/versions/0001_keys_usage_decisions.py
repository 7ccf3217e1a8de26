"""Add tenants and their keys, usage, and the decisions behind it."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
additive = False


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("pepper_id", sa.String, nullable=False),
        sa.Column("hint", sa.String, nullable=False),
        sa.Column("models", sa.JSON),
        sa.Column("admin", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.Column("stamp", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("digest", name="uq_keys_digest"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_keys_tenant"),
    )
    op.create_table(
        "usage",
        sa.Column("query_id", sa.String, nullable=False),
        sa.Column("request_id", sa.String, nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("key_id", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("error", sa.String, nullable=False),
        sa.Column("site", sa.String, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("queue_s", sa.Double),
        sa.Column("first_token_s", sa.Double),
        sa.Column("total_s", sa.Double, nullable=False),
        sa.Column("forecast_source", sa.String),
        sa.Column("forecast_expected", sa.Double),
        sa.Column("forecast_p50", sa.BigInteger),
        sa.Column("forecast_p90", sa.BigInteger),
        sa.PrimaryKeyConstraint("query_id", name="pk_usage"),
    )
    op.create_index("ix_usage_request_id", "usage", ["request_id"])
    op.create_index("ix_usage_received_at", "usage", ["received_at"])
    op.create_table(
        "decisions",
        sa.Column("query_id", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("attempt_id", sa.String, nullable=False),
        sa.Column("site", sa.String, nullable=False),
        sa.Column("policy", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("decided_s", sa.Double, nullable=False),
        sa.Column("estimates", sa.JSON, nullable=False),
        sa.Column("excluded", sa.JSON, nullable=False),
        sa.Column("ended", sa.String, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("first_token_s", sa.Double),
        sa.PrimaryKeyConstraint("query_id", "attempt", name="pk_decisions"),
    )
    op.create_index("ix_decisions_received_at", "decisions", ["received_at"])


def downgrade() -> None:
    op.drop_table("decisions")
    op.drop_table("usage")
    op.drop_table("keys")
    op.drop_table("tenants")
