"""Webhooks and their deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the tables. Earlier changes are not delivered."""
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("states", sa.Text, nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("created_by", sa.String(320), nullable=False),
        sa.Column("previous_secret", sa.String(128)),
        sa.Column("previous_until", sa.Float(53)),
        sa.Column("disabled_at", sa.Float(53)),
        sa.Column("disabled_because", sa.Text),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_until", sa.Float(53), nullable=False),
    )
    op.create_index("webhooks_by_place", "webhooks", ["project", "place"], unique=True)
    op.create_table(
        "deliveries",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("webhook_id", sa.String(64), nullable=False),
        sa.Column("message_id", sa.String(96), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("time", sa.Float(53), nullable=False),
        sa.Column("since", sa.Float(53), nullable=False),
        sa.Column("next_at", sa.Float(53)),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Column("delivered_at", sa.Float(53)),
    )
    op.create_index("deliveries_by_webhook", "deliveries", ["webhook_id", "number"])
    op.create_index("deliveries_by_job", "deliveries", ["job_id", "webhook_id"])
    op.create_index("deliveries_that_wait", "deliveries", ["webhook_id", "next_at"])


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("deliveries")
    op.drop_table("webhooks")
