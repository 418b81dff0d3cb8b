"""Longer ids of callers: the subject of a token may be long."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Widen the columns that hold the id of a caller."""
    _widen(320)


def downgrade() -> None:
    """Narrow the columns to the length of key ids. Truncate longer ids."""
    op.execute("UPDATE deeds SET key_id = substr(key_id, 1, 64)")
    op.execute("UPDATE keys SET created_by = substr(created_by, 1, 64)")
    _widen(64)


def _widen(length: int) -> None:
    for name, column in (("deeds", "key_id"), ("keys", "created_by")):
        with op.batch_alter_table(name) as table:
            table.alter_column(column, type_=sa.String(length), existing_nullable=False)
