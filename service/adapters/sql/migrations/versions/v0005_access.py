"""Keys, the audit log, and idempotency keys with the scope of their caller."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the tables. The audit log does not contain earlier writes."""
    op.create_table(
        "keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("roles", sa.Text, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Float(53)),
        sa.Column("revoked_at", sa.Float(53)),
    )
    op.create_table(
        "deeds",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("time", sa.Float(53), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("key_name", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(64), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("target", sa.String(64), nullable=False),
        sa.Column("before", sa.Text, nullable=False),
        sa.Column("after", sa.Text, nullable=False),
    )
    op.create_index("deeds_by_project", "deeds", ["project", "number"])
    _widen_idempotency_keys(320)


def downgrade() -> None:
    """Restore 0004: drop the tables, and delete idempotency keys over 255 characters."""
    op.execute("DELETE FROM idempotency_keys WHERE length(key) > 255")
    _widen_idempotency_keys(255)
    op.drop_table("deeds")
    op.drop_table("keys")


def _widen_idempotency_keys(length: int) -> None:
    with op.batch_alter_table("idempotency_keys") as table:
        table.alter_column("key", type_=sa.String(length), existing_nullable=False)
