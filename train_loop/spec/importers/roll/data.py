"""The data of ROLL's pipelines."""

from typing import Any

from pydantic import JsonValue

from train_loop.spec.importers.draft import Draft, Drop
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import data_file, is_absolute, number

_PATHS = "relative to ROLL's folder: write the URI of Parquet or JSON lines below a storage root"
_PROMPTS = "ROLL renders prompt and response by the chat template; here both are plain text: write messages instead"


def read_data(draft: Draft, worker: str, *, is_sft: bool) -> None:
    """Translate files, columns, lengths and packing."""
    arguments = f"{worker}.data_args"
    _files(draft, f"{arguments}.file_name", "data.train.path")
    _columns(draft, arguments, is_sft=is_sft)
    read_length(draft)
    _evaluation(draft, arguments, is_sft=is_sft)
    if is_sft:
        reason = "ROLL's SFT reads the rows in the order of the file, and leaves out the last, shorter batch"
        draft.differ(reason, target="data.shuffle", written=False)
    else:
        draft.differ("samples have another order than ROLL's")


def _files(draft: Draft, field: str, target: str) -> None:
    value = draft.get(field)
    paths = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str) and one]
    if not paths:
        return
    if all(is_absolute(one) for one in paths):
        draft.write(field, target, value)
        return
    written: list[JsonValue] = [one if is_absolute(one) else data_file(one) for one in paths]
    draft.need(target, written if isinstance(value, list) else written[0], _PATHS, field=field)


def _columns(draft: Draft, arguments: str, *, is_sft: bool) -> None:
    messages = f"{arguments}.messages"
    keys = ("prompt_key", "response_key") if is_sft else (f"{arguments}.prompt", f"{arguments}.response")
    if not is_sft and draft.has(messages):
        draft.take(messages, "data.columns.messages")
        draft.drop(keys[1], Drop("messages have the answers"))
    elif is_sft or draft.has(keys[0]):
        defaults = ("instruction", "output") if is_sft else ("prompt", "solution")
        for key, role, default in zip(keys, ("prompt", "response"), defaults, strict=True):
            draft.take(key, f"data.columns.{role}", reason=_PROMPTS, numbers=True)
            draft.assume(key, f"data.columns.{role}", default, tool=f"ROLL; {_PROMPTS}")
    for key in (*keys, messages):
        if not is_noted(draft, key):
            draft.drop(key, Drop("the columns of rollouts", Outcome.NOT_IMPORTED))


def is_noted(draft: Draft, field: str) -> bool:
    """Return whether a field has a row, or is absent."""
    return not draft.has(field) or any(row.field == field for row in draft.rows)


def read_length(draft: Draft) -> None:
    """Translate the lengths of prompts, responses and sequences."""
    lengths = ("prompt_length", "response_length")
    sizes: list[Any] = [number(draft.get(name, 1024 if name == "prompt_length" else None)) for name in lengths]
    if draft.has("sequence_length"):
        for name in lengths:
            draft.leave(name, "sequence_length decides")
    elif all(isinstance(size, int) for size in sizes):
        for name in lengths:
            if draft.has(name):
                draft.write(name, "data.sequence_length", sum(sizes), reason="prompt_length + response_length")


def _evaluation(draft: Draft, arguments: str, *, is_sft: bool) -> None:
    files, own = "validation.data_args.file_name", f"{arguments}.eval_file_name"
    used = next((field for field in (own, files) if draft.has(field)), None) if is_sft else None
    if used is None:
        draft.drop("eval_steps", Drop("rows to evaluate are missing: add data.eval and training.eval_steps"))
        draft.drop(own, Drop("the rows of rollouts", Outcome.NOT_IMPORTED))
        return
    _files(draft, used, "data.eval.path")
    if draft.has("eval_steps"):
        draft.take("eval_steps", "training.eval_steps", number)
    else:
        draft.assume("eval_steps", "training.eval_steps", 10, tool="ROLL")
    draft.note("validation", Outcome.NOT_NEEDED, reason="rows to evaluate are read as those to train on")
