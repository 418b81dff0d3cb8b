"""The data of torchtune's recipes."""

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, Drop
from train_loop.spec.importers.folders import read_files
from train_loop.spec.importers.values import flag, number

_DOWNLOAD = "download the rows and write their URI below a storage root"
_LOCAL = ("json", "jsonl", "parquet", "text", "csv", "arrow")
_TEXT = ("text_completion_dataset", "wikitext_dataset", "cnn_dailymail_articles_dataset")
_TRAINS_INPUTS = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""Builders whose train_on_input is true by default."""
_LENGTH = 4096


def read_data(draft: Draft) -> None:
    """Translate the rows, which of their tokens are trained, their length and packing."""
    if isinstance(draft.get("dataset"), list):
        message = "a list of datasets is not imported; write one, and list the others in data.train of the spec"
        raise SpecError([Problem("/dataset", message)])
    _source(draft, "dataset", "data.train.path")
    packs, is_text = flag(draft.get("dataset.packed", False)), _columns(draft)
    draft.take("dataset.packed", "data.packing", flag)
    _length(draft, splits=is_text and packs and flag(draft.get("dataset.split_across_pack", True)))
    if draft.has("dataset_val"):
        _source(draft, "dataset_val", "data.eval.path")
        draft.take("run_val_every_n_steps", "training.eval_steps", number)


def _source(draft: Draft, part: str, target: str) -> None:
    """Write the files of a dataset; those of the Hub are left to the user."""
    files, source = draft.get(f"{part}.data_files"), draft.get(f"{part}.source")
    builder = str(draft.get(f"{part}._component_", "")).rpartition(".")[2]
    names = [one for one in (files if isinstance(files, list) else [files]) if isinstance(one, str)]
    if names:
        read_files(draft, f"{part}.data_files", target, names, _DOWNLOAD)
        if source in _LOCAL:
            draft.leave(f"{part}.source", "data.train.format, by file extension")
        else:
            draft.leave(f"{part}.source", "the files are named")
    elif isinstance(source, str):
        read_files(draft, f"{part}.source", target, [source], f"a dataset of the Hub: {_DOWNLOAD}")
    else:
        reason = f"the rows of {builder or 'the dataset'}: {_DOWNLOAD}"
        draft.need(target, "file:///data/eval.jsonl" if part == "dataset_val" else "file:///data/train.jsonl", reason)


def _columns(draft: Draft) -> bool:
    """Write the columns. Returns whether rows are text."""
    field = "dataset._component_"
    builder = str(draft.get(field, "")).rpartition(".")[2]
    if builder in _TEXT:
        default = {"wikitext_dataset": "page", "cnn_dailymail_articles_dataset": "article"}.get(builder, "text")
        draft.take("dataset.column", "data.columns.text")
        draft.assume("dataset.column", "data.columns.text", default, tool="torchtune")
        draft.leave(field, "data.columns.text")
        _end(draft)
        return True
    column = draft.get("dataset.conversation_column")
    style = str(draft.get("dataset.conversation_style", "openai"))
    _system(draft)
    if flag(draft.get("dataset.train_on_input", builder in _TRAINS_INPUTS)):
        reason = "all tokens are trained: write each conversation as text, rendered by the chat template"
        source = "dataset.train_on_input" if draft.has("dataset.train_on_input") else field
        draft.need("data.columns", {"text": "text"}, reason, field=source)
    elif builder == "chat_dataset" and style == "openai" and isinstance(column, str):
        draft.write("dataset.conversation_column", "data.columns", {"messages": column})
    else:
        reason = f"rows of {builder or 'the dataset'}: write them as messages with role and content"
        draft.need("data.columns", {"messages": "messages"}, reason, field=field)
    for name in (
        "train_on_input",
        "conversation_column",
        "conversation_style",
        "column_map",
        "column_map.*",
        "_component_",
    ):
        draft.apply({name: Drop("data.columns", harmless=(None,))}, below="dataset")
    return False


def _end(draft: Draft) -> None:
    ends = Drop("EOS follows text here", numbers=True, harmless=(None, True))
    draft.apply({"add_eos": ends}, below="dataset")


def _system(draft: Draft) -> None:
    field = "dataset.new_system_prompt"
    if draft.has(field):
        draft.drop(field, Drop("set data.system_prompt, for conversations that have none", numbers=True))


def _length(draft: Draft, *, splits: bool) -> None:
    """Translate the length of samples. Without one, torchtune truncates nothing."""
    field = "tokenizer.max_seq_len"
    if draft.has(field):
        draft.take(field, "data.sequence_length", number)
        written: JsonValue = "split" if splits else "truncate"
        draft.assume("tokenizer.truncation_type", "data.on_long_rows", written, tool="torchtune")
        return
    reason = "torchtune reads rows of any length: write the length of the longest one"
    draft.unset(field)
    draft.need("data.sequence_length", _LENGTH, reason)
    draft.assume("tokenizer.truncation_type", "data.on_long_rows", "fail", tool="torchtune, which truncates nothing")
