"""Workers of ROLL that only compute (`fsdp2_infer`) → the fields of `kind: infer`."""

from typing import Any

from train_loop.spec.importers.draft import LOOP, Draft, put
from train_loop.spec.importers.report import Outcome, Row
from train_loop.spec.importers.values import number

_FIELDS = (
    *("name", "kind", "infer", "scaling", "data.train", "data.sequence_length"),
    *("model.path", "model.dtype", "model.attn_implementation", "model.experts_implementation"),
    *("strategy.fsdp_size", "strategy.ulysses_size", "strategy.wrap_policy", "strategy.reshard_after_forward"),
    *("strategy.apply_tiled_mlp", "strategy.tiled_num_shards"),
)
"""Fields of a job that infers."""
_SHARED = "experts are sharded by fsdp_size, and not shared; numbers stay"
_WITHOUT = {
    "strategy.ep_size": _SHARED,
    "strategy.efsdp_size": _SHARED,
    "strategy.offload_policy": "weights stay on the device; numbers stay",
}
"""Fields that only training has, with the reason."""
_BATCH = 16
"""ROLL's default of infer_batch_size."""


def keep_inference(draft: Draft, worker: str) -> None:
    """Turn a draft into one of `kind: infer`: its batch size is taken, and what belongs to training left out."""
    field = f"{worker}.infer_batch_size"
    draft.given = _kept(draft.given)
    draft.assumed = _kept(draft.assumed)
    draft.rows = [_without_training(row) for row in draft.rows if row.field != LOOP or row.target is None]
    put(draft.given, "kind", "infer")
    if draft.has(field):
        draft.take(field, "infer.batch_size", number)
    else:
        draft.assume(field, "infer.batch_size", _BATCH, tool="ROLL")
    draft.note(
        "", Outcome.TRANSLATED, target="infer.output", written="logprobs", reason="what ROLL asks a reference for"
    )
    put(draft.given, "infer.output", "logprobs")


def _kept(part: dict[str, Any], before: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in part.items():
        path = f"{before}{name}"
        if any(path == one or path.startswith(f"{one}.") for one in _FIELDS):
            kept[name] = value
        elif isinstance(value, dict) and (below := _kept(value, f"{path}.")):
            kept[name] = below
    return kept


def _without_training(row: Row) -> Row:
    target = row.target
    if target is None or any(target == one or target.startswith(f"{one}.") for one in _FIELDS):
        return row
    gone: dict[str, Any] = {"target": None, "written": None, "changes_numbers": False}
    if target in _WITHOUT and row.written not in (False, 0, 1):
        return row.model_copy(update=gone | {"outcome": Outcome.NOT_SUPPORTED, "reason": _WITHOUT[target]})
    return row.model_copy(update=gone | {"outcome": Outcome.NOT_NEEDED, "reason": "nothing is trained"})
