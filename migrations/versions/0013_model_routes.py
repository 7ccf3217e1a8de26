"""Add routes, names that stand for models, and the model of each attempt beside the name that was asked."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
additive = True


def upgrade() -> None:
    op.create_table(
        "model_routes",
        sa.Column("name", sa.String, nullable=False),
        sa.Column("route", sa.JSON, nullable=False),
        sa.Column("who", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("stamp", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_model_routes"),
    )
    op.add_column("usage", sa.Column("asked_model", sa.String, nullable=False, server_default=""))
    op.add_column("decisions", sa.Column("model", sa.String, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("decisions", "model")
    op.drop_column("usage", "asked_model")
    op.drop_table("model_routes")
