"""Lookup of the prepared datasets of a spec, without Ray."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from train_loop.data.dataset import Dataset, Part, ShardFile
from train_loop.data.masking import masking_of
from train_loop.data.order import mix
from train_loop.data.own_columns import AS_IT_IS_BYTES, own_part
from train_loop.data.own_files import index_bytes
from train_loop.data.prepare.encode import BadRow, encode_rows
from train_loop.data.prepare.rows import cut, read_piece
from train_loop.data.prepare.sources import SourceFile, list_files
from train_loop.data.shards import RECORD_BYTES
from train_loop.data.text.chat import read_template
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.data.text.tokenizer_files import tokenizer_files
from train_loop.errors import DataError
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.run_dir import read_whole
from train_loop.spec import MASKED_LM, ColumnsSpec, DataSpec, JobSpec, LabelHeadSpec, SourceSpec

FORMAT = 3
"""Version of the preparation. Raise it when the same input is prepared differently: old caches are then not reused."""

TEXT_RULES = 8
"""Version of the rules that turn text into tokens. Raise it when the same text becomes other tokens or labels."""

_ALWAYS = {"text", "input_ids", "labels", "messages", "prompt", "response", "weight", "image"}
"""Columns that fingerprints have also if they are not set; older fingerprints lack all others."""

_LIBRARIES = ("transformers", "tokenizers", "jinja2")
"""Packages that turn text into tokens; another version may turn the same text into other tokens."""

_AS_IT_IS_BYTES = 64 * 2**20
"""Maximum uncompressed size of all sources for reading Parquet files without preparation: they stay in memory."""


@dataclass(frozen=True)
class Source:
    """A source of a spec and its current files."""

    spec: SourceSpec
    columns: ColumnsSpec
    files: tuple[SourceFile, ...]

    def __str__(self) -> str:
        return ", ".join(self.spec.paths)


def list_sources(spec: JobSpec) -> list[Source]:
    """Return the sources of a spec's training data. Raises DataError."""
    return [list_source(spec, source) for source in spec.data.sources]


def list_source(spec: JobSpec, source: SourceSpec) -> Source:
    return Source(source, spec.data.columns_of(source), tuple(list_files(source)))


def find_dataset(spec: JobSpec, cache: Path) -> Dataset:
    """Return the dataset of a spec. Raises DataError if a source must be prepared first."""
    sources = list_sources(spec)
    tokenizer = tokenizer_home(spec, sources, cache)
    parts = []
    for source in sources:
        part = find_part(spec, source, tokenizer, cache)
        if part is None:
            raise DataError(
                f"{source} is not prepared in {cache}{_always_prepared(spec, source)}; run .venv/bin/python -m "
                "train_loop.prepare with the same spec first"
            )
        parts.append(part)
    return join(spec, parts, tokenizer)


def _always_prepared(spec: JobSpec, source: Source) -> str:
    """Return the reason why tokenised rows of a source are never read directly, in brackets; empty if they may be."""
    head = spec.model.label_head
    if source.columns.token_ids:
        return " (token ids of pairs are always prepared)"
    if source.columns.tokenised and head is not None and head.names:
        return " (names of classes are always prepared)"
    return ""


def find_part(spec: JobSpec, source: Source, tokenizer: Path | None, cache: Path) -> Part | None:
    """Return the samples of one source, read directly or prepared before; None if they must be prepared."""
    return _ready_made(spec, source) or load_part(cache / fingerprint(spec, source, tokenizer))


def load_part(folder: Path) -> Part | None:
    """Return the prepared samples in a cache folder; None if they are not committed or incomplete."""
    try:
        part = Part.model_validate_json(read_whole(folder / "dataset.json"))
    except (FileNotFoundError, ValidationError):
        return None
    # The recorded paths may be outdated: the same storage may be mounted elsewhere.
    part = part.in_folder(folder)
    return part if is_whole(part) else None


def join(spec: JobSpec, parts: Sequence[Part], tokenizer: Path | None) -> Dataset:
    """Combine the sources of a spec into one dataset. Raises DataError."""
    weights = [source.weight for source in spec.data.sources if source.weight is not None]
    # A dataset of one source has that source's fingerprint, whatever its weight.
    names = [part.fingerprint for part in parts]
    return Dataset(
        fingerprint=names[0] if len(names) == 1 else _digest([names, weights]),
        parts=tuple(parts),
        sequence_length=spec.data.sequence_length,
        mixture=mix(weights, [part.samples for part in parts]) if len(weights) > 1 else None,
        pad_token=_padding(spec, tokenizer),
        sequences=spec.data.sequences,
        aligned=spec.model.label_head is not None or spec.model.masked is not None,
        tokenizer=tokenizer and str(tokenizer),
        masking=masking_of(spec, tokenizer),
    )


def _padding(spec: JobSpec, tokenizer: Path | None) -> int:
    """Return the token of padding, which no token of a row attends to."""
    if tokenizer is None:
        return 0
    loaded = load_tokenizer(str(tokenizer), needs_eos=spec.model.ends_text)
    has_eos = loaded.end is not None and spec.model.masked is None
    return loaded.eos if has_eos else loaded.pad or 0


def evaluation_spec(spec: JobSpec, train: Dataset) -> JobSpec | None:
    """Return a spec that trains on the eval data of `spec`, with the tokenizer of `train`; None without eval data.

    The code that prepares, finds and pins training data thus handles eval data too.
    """
    if spec.data.eval is None:
        return None
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"train": spec.data.eval, "eval": None}),
            "model": spec.model.model_copy(update={"tokenizer": train.tokenizer or spec.model.tokenizer}),
        }
    )


def library_versions() -> dict[str, str]:
    """Return the versions of the packages that turn text into tokens."""
    return {name: version(name) for name in _LIBRARIES}


def tokenizer_home(spec: JobSpec, sources: Sequence[Source], cache: Path) -> Path | None:
    """Return the folder of the tokenizer for a spec's text; None if all sources are tokenised.

    A tokenizer that is trained on the data has a cache folder, which may not exist yet.
    """
    if all(source.columns.tokenised for source in sources):
        return None
    folder = tokenizer_folder(spec)
    if folder is not None:
        return folder
    seen = [[_described(source), _dumped(source.columns)] for source in sources]
    kind = [MASKED_LM] if spec.model.masked else []
    return cache / f"tokenizer-{_digest([FORMAT, model_shape(spec.model).vocab, seen, *kind])}"


def fingerprint(spec: JobSpec, source: Source, tokenizer: Path | None) -> str:
    """Return the SHA-256 of all that determines prepared data: files, columns, tokenizer, length, packing, format."""
    columns, data, vocab = source.columns, spec.data, model_shape(spec.model).vocab
    # Newer fields are included only if they change the result, so that older fingerprints stay valid.
    rule = data.long_rows_of(columns)
    later: dict[str, Any] = {}
    later |= {} if columns.tokenised else {"text": TEXT_RULES, "libraries": library_versions()}
    later |= {"chat_template": _template_identity(data)} if columns.may_chat and data.chat_template else {}
    later |= {"add_bos": data.add_bos} if data.add_bos != "auto" and not columns.tokenised else {}
    later |= {"on_long_rows": rule} if rule != "split" else {}
    head = spec.model.label_head
    later |= {"head": _head_identity(head)} if head is not None else {}
    later |= {"head": MASKED_LM} if spec.model.masked and not columns.tokenised else {}
    later |= {"ends": "plain"} if _is_plain(spec) and not columns.tokenised else {}
    later |= (
        {"chats": spec.chats}
        if (columns.messages and spec.chats == "whole") or (not columns.tokenised and spec.chats == "prompt")
        else {}
    )
    later |= {"untrained": "dropped"} if data.drops_untrained(columns) else {}
    return _digest(
        later
        | {
            "format": FORMAT,
            "files": _described(source),
            "columns": _dumped(columns),
            "system_prompt": data.system_prompt if columns.may_chat else None,
            "on_bad_rows": data.on_bad_rows,
            "sequence_length": data.sequence_length,
            "packing": data.packing,
            "tokenizer": None if columns.tokenised or tokenizer is None else _identity(tokenizer),
            "vocab": vocab if columns.tokenised or _has_more(spec, tokenizer, vocab) else None,
        }
    )


def _head_identity(head: LabelHeadSpec) -> dict[str, Any]:
    """Return the settings of a head. Pooling and normalisation do not change rows: fingerprints keep their defaults."""
    found = head.model_dump(exclude_none=True)
    if head.embedding is not None:
        found["embedding"] = {"pooling": "last_token", "normalize": True} | found["embedding"]
    return found


def _is_plain(spec: JobSpec) -> bool:
    """Return whether text gets no EOS although the model predicts tokens; other heads are named themselves."""
    return not spec.model.ends_text and spec.model.masked is None and spec.model.label_head is None


def _ready_made(spec: JobSpec, source: Source) -> Part | None:
    """Return the samples of small tokenised Parquet files and of own columns, which need no preparation, else None.

    Each row must be one sample. Raises DataError for unreadable files and for files without rows. Preparation reports
    invalid rows.
    """
    columns, data, head = source.columns, spec.data, spec.model.label_head
    if columns.own:
        part, size = own_part(str(source), source.files, columns.own, fingerprint=fingerprint(spec, source, None))
        return part if size <= AS_IT_IS_BYTES else None
    if columns.input_ids is None or data.packing or data.on_bad_rows == "skip" or source.files[0].format != "parquet":
        return None
    if head is not None and head.names:
        return None  # rows may have names, which only preparation turns into numbers
    pieces = cut(source.files, 0)
    if sum(piece.bytes for piece in pieces) > _AS_IT_IS_BYTES // len(data.sources):
        return None
    rows, tokens, vocab = Counter[SourceFile](), 0, model_shape(spec.model).vocab
    for piece in pieces:
        for chunk in read_piece(piece, columns):
            for document in encode_rows(chunk.rows, columns, vocab=vocab, head=head):
                if isinstance(document, BadRow) or not 1 <= len(document.input_ids) <= data.sequence_length:
                    return None
                rows[piece.file] += 1
                tokens += len(document.input_ids)
    if not rows:
        raise DataError(f"{source} holds no rows; an empty dataset cannot be trained on")
    return Part(
        fingerprint=fingerprint(spec, source, None),
        files=tuple(ShardFile(path=file.uri, rows=count, size=file.size) for file, count in rows.items()),
        input_ids=columns.input_ids,
        labels=columns.labels,
        weights=columns.weight,
        targets=columns.label,
        tokens=tokens,
        rows=rows.total(),
    )


def is_whole(part: Part) -> bool:
    """Return whether all prepared files exist with their recorded sizes."""
    assert part.index is not None
    index = index_bytes(part) if part.own else part.samples * RECORD_BYTES
    sizes = {file.path: file.size for file in part.files} | {part.index: index}
    return all(Path(path).is_file() and Path(path).stat().st_size == size for path, size in sizes.items())


def _described(source: Source) -> list[list[Any]]:
    return [[file.uri, file.format, file.size, file.version] for file in source.files]


def _dumped(columns: ColumnsSpec) -> dict[str, Any]:
    """Return the columns for a fingerprint; newer fields are included only if set."""
    return {name: value for name, value in columns.model_dump().items() if value or name in _ALWAYS}


def _identity(tokenizer: Path) -> dict[str, str]:
    files = tokenizer_files(tokenizer)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _has_more(spec: JobSpec, tokenizer: Path | None, vocab: int) -> bool:
    """Return whether a tokenizer has tokens that the model lacks: rows with one of them are bad."""
    return tokenizer is not None and load_tokenizer(str(tokenizer), needs_eos=spec.model.ends_text).vocab > vocab


def _template_identity(data: DataSpec) -> str | None:
    return data.chat_template if data.template_file is None else read_template(data.template_file)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
