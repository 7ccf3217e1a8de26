"""Add each gateway replica's summary of its own queries, for the pages of the others."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
additive = True


def upgrade() -> None:
    op.create_table(
        "replica_figures",
        sa.Column("replica", sa.String, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("summary", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("replica", name="pk_replica_figures"),
    )


def downgrade() -> None:
    op.drop_table("replica_figures")
