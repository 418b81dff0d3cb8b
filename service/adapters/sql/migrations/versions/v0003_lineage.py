"""What a job was cloned from, and the numbers of workers that an elastic one may have."""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add what is new; nothing that was there has any of it."""
    op.add_column("jobs", sa.Column("parent", sa.Text))
    op.add_column("jobs", sa.Column("sizes", sa.Text, nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("granted", sa.Integer))
    _rewrite_wishes(_with_reason)


def downgrade() -> None:
    """Back to what 0002 knows: an elastic job stays at the most workers that it asked for, a clone forgets its parent.

    The parent's checkpoint is named in the run directory, too, from which the job goes on.
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
    """A size without a range: the most workers that it can run with, or may have where that is another size's range."""
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
    """A wish that says why, where it said who."""
    code = wish.pop("by", None)
    if code is None:
        return wish
    told = "makes room for another job" if code == "preempted" else "asked for by a user"
    return wish | {"reason": {"code": code, "message": told, "remedy": None}}


def _with_code(wish: dict[str, Any]) -> dict[str, Any]:
    """The other way."""
    reason = wish.pop("reason", None)
    return wish if reason is None else wish | {"by": reason["code"]}
