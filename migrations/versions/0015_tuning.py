"""Add jobs of fine-tuning, their events, and what sites store of them."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
additive = True


def upgrade() -> None:
    op.create_table(
        "tuning_jobs",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("key_id", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("training_file_id", sa.String, nullable=False),
        sa.Column("validation_file_id", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("plan", sa.JSON, nullable=False),
        sa.Column("suffix", sa.String, nullable=False),
        sa.Column("about", sa.JSON),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.Column("error", sa.JSON),
        sa.Column("rows", sa.Integer, nullable=False),
        sa.Column("revision", sa.String, nullable=False),
        sa.Column("run", sa.String),
        sa.Column("runs", sa.Integer, nullable=False),
        sa.Column("site", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("total_steps", sa.Integer, nullable=False),
        sa.Column("trained_tokens", sa.BigInteger, nullable=False),
        sa.Column("nano_usd", sa.BigInteger, nullable=False),
        sa.Column("tokens_per_s", sa.Double, nullable=False),
        sa.Column("result_file_id", sa.String),
        sa.Column("leased_by", sa.String),
        sa.Column("leased_until", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_tuning_jobs"),
    )
    op.create_index("ix_tuning_jobs_tenant", "tuning_jobs", ["tenant"])
    op.create_index("ix_tuning_jobs_status", "tuning_jobs", ["status"])
    op.create_index("ix_tuning_jobs_created_at", "tuning_jobs", ["created_at"])
    op.create_table(
        "tuning_events",
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("level", sa.String, nullable=False),
        sa.Column("message", sa.String, nullable=False),
        sa.Column("data", sa.JSON),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_tuning_events"),
    )
    op.create_table(
        "tuning_content",
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("sha256", sa.String, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("file_id", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "kind", "step", name="pk_tuning_content"),
    )
    op.create_index("ix_tuning_content_sha256", "tuning_content", ["sha256"])


def downgrade() -> None:
    op.drop_table("tuning_content")
    op.drop_table("tuning_events")
    op.drop_table("tuning_jobs")
