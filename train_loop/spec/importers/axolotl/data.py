"""The data of axolotl's configurations."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft
from train_loop.spec.importers.folders import local_file
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag

Every = Callable[[str, str], JsonValue]
"""Returns the steps between two events, by the names of the fields per epoch and in steps."""
_LONG = {"drop": "drop", "truncate": "truncate", "raise": "fail"}
_DOWNLOAD = "download the rows, and write the URIs of their files below a storage root"
_LOCAL = ("json", "jsonl", "parquet", "text", "csv", "arrow")
_MESSAGES = ("role", "content")
_NOT_NEEDED = {
    "path": "", "type": "", "data_files": "", "field": "", "text_column": "", "field_messages": "", "field_tools": "",
    "message_property_mappings": "", "message_field_role": "", "message_field_content": "",
    "ds_type": "data.train.format, by file extension",
    "revision": "you download the files",
    "trust_remote_code": "files are read as rows",
    "conversation": "rows are rendered by the chat template",
}  # fmt: skip
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "split": (None, "train"),
    "roles_to_train": (None, ["assistant"]),
    "train_on_eos": (None, "turn"),
    "train_on_eot": (None, "turn"),
    "chat_template": (None, "tokenizer_default"),
    "skip": (None, 0),
    "roles": (None, {"user": ["user"], "assistant": ["assistant"], "system": ["system"]}),
}
"""Values of the options of a dataset without which nothing is lost."""
_REASONS = {
    "split": "all rows of the files are read: write those of the split to a file",
    "shards": "all rows of the files are read: write those of the shard to a file",
    "roles_to_train": "answers of the assistant are trained, and nothing else",
    "train_on_eos": "the end of each answer is trained",
    "train_on_eot": "the end of each answer is trained",
    "chat_template": "rows are rendered by the tokenizer's own chat template; set data.chat_template",
}


def read_data(draft: Draft, *, every: Every) -> None:
    """Translate the rows, which of their tokens are trained, and evaluation. Raises SpecError."""
    _long_rows(draft)
    part = "pretraining_dataset" if draft.has("pretraining_dataset") else "datasets"
    if part == "pretraining_dataset" and not draft.has("max_steps"):
        raise SpecError([Problem("/pretraining_dataset", "axolotl needs max_steps with it; add it")])
    _rows(draft, part, "data.train")
    draft.leave("datasets", "pretraining_dataset is read")
    _evaluation(draft, every)


def _long_rows(draft: Draft) -> None:
    field, target = "excess_length_strategy", "data.on_long_rows"
    given = str(draft.get(field, "drop")).lower()
    if draft.has(field) and given in _LONG:
        draft.write(field, target, _LONG[given])


def _rows(draft: Draft, part: str, target: str) -> None:
    """Write the sources of a part: their files, and columns by the kind of their rows."""
    given = draft.get(part)
    entries = given if isinstance(given, list) else [given]
    sources = [{"path": one} if isinstance(one, str) else one for one in entries]
    if not sources or not all(isinstance(one, Mapping) for one in sources):
        raise SpecError([Problem(f"/{part}", f"expected a list of datasets in {part}, each with a path")])
    is_pretraining = part == "pretraining_dataset"
    found = [_source(draft, f"{part}.{place}", one, is_pretraining=is_pretraining) for place, one in enumerate(sources)]
    paths = [path for uris, _ in found for path in uris]
    kinds = [columns for _, columns in found]
    if all(one == kinds[0] for one in kinds):
        written: JsonValue = {"path": paths[0] if len(paths) == 1 else [*paths]}
        draft.need(target, written, f"{_DOWNLOAD}; {_hint(sources[0])}", field=part)
        if target == "data.train" or kinds[0] != draft.given["data"].get("columns"):
            draft.need("data.columns", kinds[0], _hint(sources[0]), field=part)
    else:
        written = [{"path": uris[0] if len(uris) == 1 else [*uris], "columns": columns} for uris, columns in found]
        draft.need(target, written, f"{_DOWNLOAD}; {_hint(sources[0])}", field=part)
    if all(kind == {"text": kind.get("text")} for kind in kinds if isinstance(kind, dict)):
        draft.assume("excess_length_strategy", "data.on_long_rows", "split", tool="axolotl, which cuts texts in pieces")
    else:
        draft.assume("excess_length_strategy", "data.on_long_rows", "drop", tool="axolotl")


def _source(draft: Draft, field: str, entry: Mapping[str, Any], *, is_pretraining: bool) -> tuple[list[str], JsonValue]:
    """Return the files of a dataset, and the columns of its rows. Other options are reported."""
    for name, value in entry.items():
        if name in _NOT_NEEDED or value in _HARMLESS.get(str(name), (None, False)):
            continue
        reason = _REASONS.get(str(name), "not an option of data.train")
        draft.note(f"{field}.{name}", Outcome.NOT_SUPPORTED, reason=reason, numbers=True)
    files = entry.get("data_files") or entry.get("path")
    names = [str(one) for one in (files if isinstance(files, list) else [files])]
    return [local_file(one) for one in names], _columns(draft, entry, is_pretraining)


def _columns(draft: Draft, entry: Mapping[str, Any], is_pretraining: bool) -> JsonValue:
    """Return the columns of a dataset by its type, and by the tokens that are trained. Raises SpecError."""
    kind = entry.get("type")
    name = "text" if is_pretraining else str(kind).partition(".")[0] if isinstance(kind, str) else ""
    if name == "_synthetic":
        raise SpecError([Problem("/datasets", "synthetic rows are not imported; give files")])
    if is_pretraining or name == "completion":
        return {"text": str(entry.get("text_column") or entry.get("field") or "text")}
    if kind is None:
        return {"input_ids": "input_ids", "labels": "labels"}
    if flag(draft.get("train_on_inputs", False)):
        return {"text": "text"}
    if name == "chat_template":
        return (
            {"messages": str(entry.get("field_messages") or "messages")}
            if _is_plain(entry)
            else {"messages": "messages"}
        )
    return {"prompt": "prompt", "response": "response"}


def _is_plain(entry: Mapping[str, Any]) -> bool:
    """Return whether messages have role and content."""
    mapping = entry.get("message_property_mappings") or {}
    named = (
        mapping.get("role") or entry.get("message_field_role"),
        mapping.get("content") or entry.get("message_field_content"),
    )
    return all(given in (None, name) for given, name in zip(named, _MESSAGES, strict=True))


def _hint(entry: Mapping[str, Any]) -> str:
    kind = entry.get("type")
    return f"rows of type {kind if isinstance(kind, str) else 'own prompts' if kind else 'input_ids'}"


def _evaluation(draft: Draft, every: Every) -> None:
    """Translate the rows that are held out, and how often they are evaluated."""
    held = "test_datasets" if draft.get("test_datasets") else "val_set_size" if draft.get("val_set_size") else None
    steps = every("evals_per_epoch", "eval_steps")
    strategy = str(draft.get("eval_strategy", draft.get("evaluation_strategy", "no"))).lower()
    fields = ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy")
    field = next((one for one in fields if draft.get(one)), "")
    if held is not None and (steps != 0 or strategy == "epoch"):
        if held == "test_datasets":
            _rows(draft, held, "data.eval")
        else:
            reason = "axolotl holds this part of the rows out: write them to another file"
            draft.need("data.eval.path", "file:///data/eval.jsonl", reason, field=held)
        if isinstance(steps, int) and steps > 0:
            draft.write(field, "training.eval_steps", steps)
        else:
            reason = "write the steps between evaluations, from those of an epoch that trainshed plan prints"
            draft.need("training.eval_steps", 500, reason, field=field)
    elif held is not None:
        reason = "axolotl holds these rows out and does not evaluate them: leave them out of the files"
        draft.note(held, Outcome.NOT_SUPPORTED, reason=reason, numbers=held == "val_set_size")
    for name in (*fields, "val_set_size", "test_datasets"):
        draft.leave(name, "nothing is evaluated" if held is None else "another field decides")
