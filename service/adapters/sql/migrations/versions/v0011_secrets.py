"""Columns for encrypted webhook secrets, and a row that verifies the key of a service."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Widen the columns. The service encrypts their values at startup, because only it has the key."""
    op.create_table(
        "secret_checks", sa.Column("id", sa.Integer, primary_key=True), sa.Column("token", sa.Text, nullable=False)
    )
    with op.batch_alter_table("webhooks") as batch:
        batch.alter_column("secret", type_=sa.Text, existing_type=sa.String(128), existing_nullable=False)
        batch.alter_column("previous_secret", type_=sa.Text, existing_type=sa.String(128), existing_nullable=True)


def downgrade() -> None:
    """Narrow the columns. Delete encrypted secrets and their webhooks: older versions cannot decrypt them."""
    op.execute("DELETE FROM webhooks WHERE secret LIKE 'fernet:%'")
    op.execute("UPDATE webhooks SET previous_secret = NULL WHERE previous_secret LIKE 'fernet:%'")
    with op.batch_alter_table("webhooks") as batch:
        batch.alter_column("secret", type_=sa.String(128), existing_type=sa.Text, existing_nullable=False)
        batch.alter_column("previous_secret", type_=sa.String(128), existing_type=sa.Text, existing_nullable=True)
    op.drop_table("secret_checks")
