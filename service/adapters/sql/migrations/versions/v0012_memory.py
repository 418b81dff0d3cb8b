"""The host memory that each worker of a job reserves, by number of workers."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Add the column. Jobs of older versions reserve no memory."""
    op.add_column("jobs", sa.Column("memory", sa.Text, nullable=False, server_default="{}"))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("jobs", "memory")
