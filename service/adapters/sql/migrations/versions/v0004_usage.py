"""What jobs that were deleted had used."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add its table; of jobs that are gone already nothing is known."""
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
    """Back to what 0003 knows: the hours of jobs that are there."""
    op.drop_table("deleted_usage")
