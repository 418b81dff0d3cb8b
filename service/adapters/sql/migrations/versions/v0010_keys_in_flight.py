"""Idempotency keys without a job: before this revision, a request stored its key before its job."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Delete the keys of requests that never stored a job: they would never be released."""
    keys = sa.table("idempotency_keys", sa.column("job_id", sa.String))
    op.execute(keys.delete().where(keys.c.job_id.is_(None)))


def downgrade() -> None:
    """Change nothing: older versions can read keys with jobs."""
