"""Add each site's newest certificate and the time of its last revocation."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
additive = True


def upgrade() -> None:
    op.create_table(
        "site_certificates",
        sa.Column("site", sa.String, nullable=False),
        sa.Column("serial", sa.String),
        sa.Column("issued_at", sa.Double),
        sa.Column("expires_at", sa.Double),
        sa.Column("renewals", sa.Integer, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.Column("reason", sa.String, nullable=False),
        sa.PrimaryKeyConstraint("site", name="pk_site_certificates"),
    )


def downgrade() -> None:
    op.drop_table("site_certificates")
