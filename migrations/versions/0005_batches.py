"""Add files in parts, batches, and the lines of batches with their outcomes."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
additive = True


def upgrade() -> None:
    _files()
    _batches()
    _lines()


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("filename", sa.String, nullable=False),
        sa.Column("purpose", sa.String, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant", "files", ["tenant"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "file_parts",
        sa.Column("file_id", sa.String, nullable=False),
        sa.Column("part", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("file_id", "part", name="pk_file_parts"),
    )


def _batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("key_id", sa.String, nullable=False),
        sa.Column("endpoint", sa.String, nullable=False),
        sa.Column("input_file_id", sa.String, nullable=False),
        sa.Column("completion_window", sa.String, nullable=False),
        sa.Column("about", sa.JSON),
        sa.Column("model", sa.String),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("in_progress_at", sa.Double),
        sa.Column("finalizing_at", sa.Double),
        sa.Column("completed_at", sa.Double),
        sa.Column("failed_at", sa.Double),
        sa.Column("expired_at", sa.Double),
        sa.Column("cancelling_at", sa.Double),
        sa.Column("cancelled_at", sa.Double),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("completed", sa.Integer, nullable=False),
        sa.Column("failed", sa.Integer, nullable=False),
        sa.Column("errors", sa.JSON),
        sa.Column("output_file_id", sa.String),
        sa.Column("error_file_id", sa.String),
        sa.Column("output_kept_s", sa.Double, nullable=False),
        sa.Column("leased_by", sa.String),
        sa.Column("leased_until", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_tenant", "batches", ["tenant"])
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_index("ix_batches_created_at", "batches", ["created_at"])


def _lines() -> None:
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String, nullable=False),
        sa.Column("line", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("custom_id", sa.String, nullable=False),
        sa.Column("begins", sa.BigInteger, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("response_tokens", sa.Double, nullable=False),
        sa.Column("runs", sa.Integer, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("outcome", sa.LargeBinary),
        sa.Column("failed", sa.Boolean),
        sa.PrimaryKeyConstraint("batch_id", "line", name="pk_batch_lines"),
    )
    op.create_index("ix_batch_lines_place", "batch_lines", ["batch_id", "place"])


def downgrade() -> None:
    op.drop_table("batch_lines")
    op.drop_table("batches")
    op.drop_table("file_parts")
    op.drop_table("files")
