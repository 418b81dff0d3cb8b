"""Parents of clones, and the possible numbers of workers of elastic jobs."""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns, which are empty for existing jobs, and store reasons in stop requests."""
    op.add_column("jobs", sa.Column("parent", sa.Text))
    op.add_column("jobs", sa.Column("sizes", sa.Text, nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("granted", sa.Integer))
    _rewrite_wishes(_with_reason)


def downgrade() -> None:
    """Restore 0002: an elastic job keeps its largest size, and a clone loses its parent.

    A clone still resumes from the parent's checkpoint, because its run directory names it, too.
    """
    connection = op.get_bind()
    table = sa.Table("jobs", sa.MetaData(), autoload_with=connection)
    for row in connection.execute(sa.select(table)).all():
        spec, sizes = json.loads(row.spec), json.loads(row.sizes)
        spec["scaling"] = _fixed(spec["scaling"], sizes)
        scaling = None if row.scaling is None else json.dumps(_fixed(json.loads(row.scaling), sizes))
        fixed = {"spec": json.dumps(spec), "scaling": scaling, "size": scaling or json.dumps(spec["scaling"])}
        connection.execute(table.update().where(table.c.id == row.id).values(fixed))
    _rewrite_wishes(_with_code)
    op.drop_column("jobs", "granted")
    op.drop_column("jobs", "sizes")
    op.drop_column("jobs", "parent")


def _fixed(scaling: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """Replace a range by the largest possible number of workers, or by its maximum if no possible size is in it."""
    workers = scaling["num_workers"]
    if not isinstance(workers, dict):
        return scaling
    possible = [size for size in sizes if workers["min"] <= size <= workers["max"]]
    return scaling | {"num_workers": max(possible, default=workers["max"])}


def _rewrite_wishes(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    connection = op.get_bind()
    table = sa.Table("jobs", sa.MetaData(), autoload_with=connection)
    for row in connection.execute(sa.select(table.c.id, table.c.wish).where(table.c.wish.is_not(None))).all():
        wish = json.dumps(change(json.loads(row.wish)))
        connection.execute(table.update().where(table.c.id == row.id).values(wish=wish))


def _with_reason(wish: dict[str, Any]) -> dict[str, Any]:
    """Replace the field `by` of a stop request with a reason."""
    code = wish.pop("by", None)
    if code is None:
        return wish
    told = "makes room for another job" if code == "preempted" else "asked for by a user"
    return wish | {"reason": {"code": code, "message": told, "remedy": None}}


def _with_code(wish: dict[str, Any]) -> dict[str, Any]:
    """Replace the reason of a stop request with the field `by`."""
    reason = wish.pop("reason", None)
    return wish if reason is None else wish | {"by": reason["code"]}
