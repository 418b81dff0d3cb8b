"""The rows of TRL: files, columns, length and packing."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import data_file, flag, is_absolute, number

_LENGTH, _OLD_LENGTH = "max_length", "max_seq_length"
_FILES = "an id of the Hub or a relative path: write the URI of Parquet or JSON lines below a storage root"
_LONG = {"bfd": "truncate", "bfd_split": "split", "bfd-requeue": "split", "wrapped": "split"}
_ENDS = {"keep_start": "truncate", "keep_end": "truncate_left"}
_ALL_TOKENS = (
    "TRL chooses by the columns of the rows: for messages, or prompt with completion, set data.columns; it trains all "
    "tokens of messages unless assistant_only_loss is on, and here only the assistant's turns are trained"
)


def read_rows(draft: Draft) -> None:
    """Translate the rows of `trl sft`."""
    read_files(draft)
    read_length(draft)
    draft.take("packing", "data.packing", flag)
    _columns(draft)
    packs, cut = flag(draft.get("packing", False)), "truncation_mode"
    if packs:
        _packed(draft)
    else:
        draft.leave("packing_strategy", "packing is off")
        _long_rows(draft, cut, _ENDS, "keep_start")
    draft.leave(cut, "packing_strategy decides")


def read_files(draft: Draft) -> None:
    """Translate the sources; those of `datasets` win."""
    several: Any = draft.get("datasets")
    field = "datasets" if several else "dataset_name"
    if not several:
        draft.leave("datasets", "off")
    paths = list(_paths(several)) if isinstance(several, list) else [draft.get(field)]
    names = [str(one) for one in paths if one]
    if not names:
        return
    written: list[JsonValue] = [one if is_absolute(one) else data_file(one) for one in names]
    uris = written[0] if len(written) == 1 else written
    if all(is_absolute(one) for one in names):
        draft.write(field, "data.train.path", uris)
    else:
        draft.need("data.train.path", uris, _FILES, field=field)
    if isinstance(several, list) and any(isinstance(one, Mapping) and one.get("fraction") for one in several):
        reason = "fractions of sources are not read: give each source of data.train a weight"
        draft.note("datasets", Outcome.NOT_SUPPORTED, reason=reason, numbers=True)
    if several:
        draft.leave("dataset_name", "datasets wins")


def _paths(sources: list[Any]) -> Iterator[Any]:
    for source in sources:
        files = source.get("data_files") if isinstance(source, Mapping) else None
        if isinstance(files, list):
            yield from files
        else:
            yield files or (source.get("path") if isinstance(source, Mapping) else source)


def read_length(draft: Draft) -> None:
    """Translate the tokens of a row; null stands for no limit."""
    target = "data.sequence_length"
    if draft.is_null(_LENGTH):
        draft.need(target, 4096, "TRL has no limit here: write the tokens of the longest row", field=_LENGTH)
    elif draft.has(_LENGTH):
        draft.take(_LENGTH, target, number)
    else:
        draft.take(_OLD_LENGTH, target, number)
    draft.leave(_OLD_LENGTH, f"{_LENGTH} wins")


def _columns(draft: Draft) -> None:
    """Translate the tokens that are trained, which tell the columns, or else write the column of text."""
    answers, completions = "assistant_only_loss", "completion_only_loss"
    if flag(draft.get(answers, False)):
        draft.write(answers, "data.columns.messages", "messages", reason="the assistant's turns are trained")
        draft.leave("dataset_text_field", "rows have messages")
        draft.leave(completions, "the assistant's turns are trained")
        return
    if flag(draft.get(completions, False)):
        reason = "the completion is trained; both are plain text"
        for role, column in (("prompt", "prompt"), ("response", "completion")):
            draft.write(completions, f"data.columns.{role}", column, reason=reason)
        draft.leave("dataset_text_field", "rows have prompt and completion")
        draft.leave(answers, "off")
        return
    draft.take("dataset_text_field", "data.columns.text")
    draft.assume("dataset_text_field", "data.columns.text", "text", tool="TRL")
    draft.leave(answers, "off: the whole text is trained")
    draft.leave(completions, "off: the whole text is trained")
    draft.differ(_ALL_TOKENS)


def _packed(draft: Draft) -> None:
    strategy = "packing_strategy"
    _long_rows(draft, strategy, _LONG, "bfd")
    if draft.get(strategy) == "wrapped":
        reason = "wrapped cuts rows anywhere, and they attend to one another; here documents stay apart"
        draft.note(strategy, Outcome.NOT_SUPPORTED, reason=reason, numbers=True)


def _long_rows(draft: Draft, field: str, rules: Mapping[str, str], default: str) -> None:
    """Write the handling of rows that are longer than a sample. Raises SpecError for a word that TRL does not have."""
    chosen = str(draft.get(field, default))
    if chosen not in rules:
        raise SpecError([Problem(f"/{field}", f"invalid {field} {chosen:.40}; expected {', '.join(rules)}")])
    if draft.has(field):
        draft.write(field, "data.on_long_rows", rules[chosen])
    draft.assume(field, "data.on_long_rows", rules[chosen], tool="TRL")
