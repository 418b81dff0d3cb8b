"""Files of other tools → one spec that JobSpec accepts, and the report of all their fields."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, has, put
from train_loop.spec.importers.recognise import Source
from train_loop.spec.importers.references import Read
from train_loop.spec.importers.registry import TOOLS, importer_of
from train_loop.spec.importers.report import Imported, Outcome, Row
from train_loop.spec.importers.text import read_text
from train_loop.spec.importers.values import DATA_FOLDER, MODEL_FOLDER
from train_loop.spec.job import JobSpec
from train_loop.spec.names import field_paths
from train_loop.spec.parse import merged, parse_any
from train_loop.spec.text import add_positions

_ENDS = ("num_train_epochs", "max_steps", "max_tokens")
_RATE = 5e-5
_PLACEHOLDERS: dict[str, tuple[JsonValue, str]] = {
    "model.path": (f"file://{MODEL_FOLDER}/MODEL", "the URI of the model's folder below a storage root"),
    "data.train.path": (f"file://{DATA_FOLDER}/train.jsonl", "the URI of the rows below a storage root"),
    "training.learning_rate": (
        _RATE,
        "the files describe no training, so that batch, schedule and packing are a spec's defaults; this rate is that "
        "of TrainingArguments: import those, too",
    ),
}


def _absent(name: str) -> bytes | None:
    return None


@dataclass(frozen=True)
class SourceFile:
    """A configuration of another tool."""

    name: str
    text: bytes
    read: Read = _absent
    """Reads configs next to the file, which Hydra's `defaults` name."""


class SourceError(SpecError):
    """A configuration that cannot be imported; `file` is the name of the file with the problems."""

    def __init__(self, problems: list[Problem], file: str) -> None:
        super().__init__(problems)
        self.file = file


def import_files(files: Sequence[SourceFile], *, worker: str | None = None, overrides: Mapping[str, Any]) -> Imported:
    """Return one spec from one or several files, of which later ones win, and the report of each field.

    `worker` is a path in ROLL's file: `actor_train`. `overrides` are merged into the spec. Raises SourceError.
    """
    drafts: list[tuple[SourceFile, str, Draft]] = []
    for file in files:
        try:
            drafts.append((file, *_read(Source(read_text(file.text, TOOLS), file.read, worker))))
        except SpecError as error:
            raise _located(error.problems, file) from error
    spec = _merge([draft for _, _, draft in drafts])
    rows = _rows([draft for _, _, draft in drafts], spec)
    is_training = spec.get("kind", "train") == "train"
    for target, (value, reason) in _PLACEHOLDERS.items():
        if not _is_set(spec, target) and (is_training or target != "training.learning_rate"):
            put(spec, target, value)
            rows.append(Row(field="", outcome=Outcome.NEEDED, target=target, written=value, reason=reason,
                            changes_numbers=target == "training.learning_rate"))  # fmt: skip
    if not has(spec, "scaling.resources_per_worker"):
        put(spec, "scaling.resources_per_worker", {"CPU": 1, "GPU": 1})
    spec = merged({"name": "imported"} | spec, overrides)
    rows = [row for row in rows if not (row.outcome is Outcome.NEEDED and has(overrides, str(row.target)))]
    try:
        parse_any(spec)
    except SpecError as error:
        raise _traced(error.problems, drafts, overrides) from error
    return Imported(formats=tuple(name for _, name, _ in drafts), spec=_ordered(spec), rows=tuple(rows))


def _is_set(spec: Mapping[str, Any], target: str) -> bool:
    """Return whether a spec has a value at a dotted path, or a list of sources above it."""
    return has(spec, target) or isinstance(_value(spec, target.rpartition(".")[0]), list)


def _ordered(part: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return fields in the order of the spec."""
    fields = field_paths(JobSpec)
    names = sorted(
        part, key=lambda name: fields.index(f"{before}{name}") if f"{before}{name}" in fields else len(fields)
    )
    return {
        name: _ordered(part[name], f"{before}{name}.") if isinstance(part[name], dict) else part[name] for name in names
    }


def _read(source: Source) -> tuple[str, Draft]:
    """Return the name of a file's format, and the draft of a job. Raises SpecError."""
    name, convert = importer_of(source)
    draft = convert(source)
    if source.worker is not None and draft.worker is None:
        raise SpecError([Problem("", f"a file of {name} has no workers of ROLL; remove --worker")])
    return name if draft.worker is None else f"{name}, worker {draft.worker}", draft


def _merge(drafts: Sequence[Draft]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    assumed: dict[str, Any] = {}
    for draft in drafts:
        assumed, given = merged(assumed, draft.assumed), merged(given, draft.given)
    if any(has(given, f"training.{end}") for end in _ENDS) and "training" in assumed:
        assumed["training"] = {name: value for name, value in assumed["training"].items() if name not in _ENDS}
    return dict(merged(assumed, given))


def _rows(drafts: Sequence[Draft], spec: Mapping[str, Any]) -> list[Row]:
    """Return the rows of all files, without assumptions that another file replaces."""
    return [
        row
        for draft in drafts
        for row in draft.rows
        if not (
            row.outcome in (Outcome.DEFAULT, Outcome.NEEDED) and row.target and _value(spec, row.target) != row.written
        )
    ]


def _value(spec: Mapping[str, Any], target: str) -> Any:
    value: Any = spec
    for step in target.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _traced(
    problems: Sequence[Problem], drafts: Sequence[tuple[SourceFile, str, Draft]], overrides: Mapping[str, Any]
) -> SourceError:
    """Return the error about a spec with the places of its problems in the sources."""
    traced = []
    for problem in problems:
        target = problem.pointer.removeprefix("/").replace("/", ".")
        for file, _, draft in reversed(drafts):
            pointer = _source_of(target, draft.pointers)
            if pointer is not None and not has(overrides, target):
                found = Problem(pointer, f"{problem.message} ({target} of the spec)")
                traced.append((file, add_positions([found], file.text)[0]))
                break
        else:
            traced.append((drafts[-1][0], Problem(problem.pointer, f"{problem.message} (in the spec)")))
    file = traced[0][0]
    return SourceError([problem for one, problem in traced if one is file], file.name)


def _source_of(target: str, pointers: Mapping[str, str]) -> str | None:
    near = [
        name for name in pointers if target == name or target.startswith(f"{name}.") or name.startswith(f"{target}.")
    ]
    return pointers[max(near, key=len)] if near and target else None


def _located(problems: Sequence[Problem], file: SourceFile) -> SourceError:
    return SourceError(add_positions(problems, file.text), file.name)
