"""Usage of deleted jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the table. The usage of jobs that were deleted before is unknown."""
    op.create_table(
        "deleted_usage",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("day", sa.Date, primary_key=True),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("worker_hours", sa.Float(53), nullable=False),
        sa.Column("cpu_hours", sa.Float(53), nullable=False),
        sa.Column("gpu_hours", sa.Float(53), nullable=False),
    )
    op.create_index("deleted_usage_by_day", "deleted_usage", ["day"])


def downgrade() -> None:
    """Restore 0003, which knows only the usage of existing jobs."""
    op.drop_table("deleted_usage")
