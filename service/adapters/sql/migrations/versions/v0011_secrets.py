"""Room for encrypted webhook secrets, and a row that tells whether a service has the right key."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Widen the columns; the service encrypts what is in them when it starts, because only it has the key."""
    op.create_table(
        "secret_checks", sa.Column("id", sa.Integer, primary_key=True), sa.Column("token", sa.Text, nullable=False)
    )
    with op.batch_alter_table("webhooks") as batch:
        batch.alter_column("secret", type_=sa.Text, existing_type=sa.String(128), existing_nullable=False)
        batch.alter_column("previous_secret", type_=sa.Text, existing_type=sa.String(128), existing_nullable=True)


def downgrade() -> None:
    """Delete webhooks whose secrets only the newer version can decrypt."""
    op.execute("DELETE FROM webhooks WHERE secret LIKE 'fernet:%'")
    op.execute("UPDATE webhooks SET previous_secret = NULL WHERE previous_secret LIKE 'fernet:%'")
    with op.batch_alter_table("webhooks") as batch:
        batch.alter_column("secret", type_=sa.String(128), existing_type=sa.Text, existing_nullable=False)
        batch.alter_column("previous_secret", type_=sa.String(128), existing_type=sa.Text, existing_nullable=True)
    op.drop_table("secret_checks")
