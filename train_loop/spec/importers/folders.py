"""Models, adapters and files of other tools: URIs below a storage root, or names that the user replaces by one."""

from collections.abc import Sequence

from pydantic import JsonValue

from train_loop.spec.importers.draft import Draft
from train_loop.spec.importers.values import data_file, is_absolute, model_folder


def read_folder(draft: Draft, field: str, target: str, *, reason: str = "") -> None:
    """Write the URI of a folder; an id of the Hub, or a relative path, is left to the user."""
    value = draft.get(field)
    if not isinstance(value, str) or not value:
        draft.take(field, target)
    elif is_absolute(value):
        draft.write(field, target, value, reason=reason)
    else:
        uri = model_folder(value)
        local = uri.removeprefix("file://")
        draft.need(
            target, uri, reason or f"run `hf download {value} --local-dir {local}` below a storage root", field=field
        )


def local_file(name: str) -> str:
    """Return the URI of a file; a name that is not absolute is that of JSON lines, if it has no extension."""
    if is_absolute(name):
        return name
    uri = data_file(name)
    return uri if "." in uri.rpartition("/")[2] else f"{uri}.jsonl"


def read_files(draft: Draft, field: str, target: str, values: Sequence[str], reason: str) -> None:
    """Write the URIs of files; names that need a working directory or the Hub are left to the user."""
    written: list[JsonValue] = [local_file(one) for one in values]
    uris: JsonValue = written[0] if len(written) == 1 else written
    if all(is_absolute(one) for one in values):
        draft.write(field, target, uris)
    else:
        draft.need(target, uris, reason, field=field)
