"""Idempotency-Keys are stored with their job; until now a request stored its key before."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Delete the keys of requests that never stored a job: nobody would release them."""
    keys = sa.table("idempotency_keys", sa.column("job_id", sa.String))
    op.execute(keys.delete().where(keys.c.job_id.is_(None)))


def downgrade() -> None:
    """Change nothing: older versions read keys with jobs."""
