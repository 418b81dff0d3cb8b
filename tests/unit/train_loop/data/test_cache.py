"""Prepared samples: the cache folder that a spec selects, and detection of damage."""

import json
import shutil
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.folders import write_tokenizer
from tests.support.builders.specs import TINY, spec
from train_loop.data.dataset import Dataset, Part
from train_loop.data.prepare.cache import (
    evaluation_spec,
    find_dataset,
    fingerprint,
    join,
    library_versions,
    list_sources,
    load_part,
    tokenizer_home,
)
from train_loop.data.prepare.packing import Sample
from train_loop.data.prepare.pointer import as_in_parent, pin, pinned_dataset
from train_loop.data.shards import write_part
from train_loop.data.stream.local import read_rows
from train_loop.errors import DataError
from train_loop.run_dir import DataPosition, Manifest, Parent, RunDir
from train_loop.spec import JobSpec, parse

TOKENS = {"columns": {"input_ids": "ids"}, "packing": False, "shuffle": False, "sequence_length": 16}


def text_job(folder: Path, **parts: Any) -> JobSpec:
    """Return a job that trains on one line of text with its own tokenizer folder."""
    if not (folder / "tokenizer-v1").exists():
        (folder / "a.jsonl").write_text(json.dumps({"text": "x"}))
        write_tokenizer(folder / "tokenizer-v1")
    data = {"train": {"path": str(folder / "a.jsonl")}} | parts.pop("data", {})
    return spec(data=data, model={"tokenizer": str(folder / "tokenizer-v1")}, **parts)


def name_of(job: JobSpec) -> str:
    (source,) = list_sources(job)
    return fingerprint(job, source, tokenizer_home(job, [source], Path("/cache")))


def prepared(folder: Path, *, first: int = 0) -> Part:
    """Return samples committed to a cache folder."""
    folder.mkdir(parents=True)
    part = write_part([Sample(np.arange(first, first + 5, dtype=np.int32), None, None, [5])] * 3, folder)
    (folder / "dataset.json").write_text(part.model_dump_json())
    return part


def test_tokenizer_is_identified_by_content_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = text_job(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    copied = one.model_copy(
        update={"model": one.model.model_copy(update={"tokenizer": f"{tmp_path}/copy/tokenizer-v1"})}
    )
    assert name_of(one) == name_of(copied)
    write_tokenizer(tmp_path / "one" / "tokenizer-v1", words=301)
    assert name_of(one) != name_of(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 33},
        {"packing": False},
        {"on_bad_rows": "skip"},
        {"columns": {"text": "text", "weight": "w"}},
        {"on_long_rows": "truncate"},
        {"columns": {"messages": "m"}},
        {"columns": {"messages": "m", "tools": "x"}},
        {"columns": {"messages": "m"}, "on_long_rows": "split"},
    ],
)
def test_cache_name_changes_with_each_field_that_affects_samples(tmp_path: Path, change: dict[str, Any]) -> None:
    assert name_of(text_job(tmp_path)) != name_of(text_job(tmp_path, data=change))
    assert name_of(text_job(tmp_path)) == name_of(text_job(tmp_path, data={"seed": 3, "shuffle": False}))


def test_cache_names_of_tokens_equal_those_of_earlier_versions_and_names_of_text_do_not(tmp_path: Path) -> None:
    text, tokens = text_job(tmp_path), as_it_is(tmp_path, pa.array([[1]]))
    first = ("text", "input_ids", "labels", "messages", "prompt", "response", "weight", "image")
    for job, tokenizer, vocab in ((text, tmp_path / "tokenizer-v1", None), (tokens, None, 384)):
        (source,) = list_sources(job)
        old = {
            "format": 3,
            "files": [[file.uri, file.format, file.size, file.version] for file in source.files],
            "columns": {name: source.columns.model_dump()[name] for name in first},
            "system_prompt": None,
            "on_bad_rows": "fail",
            "sequence_length": job.data.sequence_length,
            "packing": job.data.packing,
            "tokenizer": None
            if tokenizer is None
            else [
                sha256((tokenizer / name).read_bytes()).hexdigest()
                for name in ("tokenizer.json", "tokenizer_config.json")
            ],
            "vocab": vocab,
        }
        # Text is read as transformers does since these versions, so that it may have other tokens.
        assert (name_of(job) == sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()) is (tokenizer is None)
        # A spec of an earlier version lacks these fields and means the same.
        stored = job.model_dump(mode="json")
        for part in (stored["data"], stored["data"]["columns"]):
            part.pop("on_long_rows", None)
            part.pop("tools", None)
            part.pop("own", None)
        assert parse(stored) == job
        assert name_of(parse(stored)) == name_of(job)


def test_run_of_an_earlier_version_resumes_with_its_first_samples(tmp_path: Path) -> None:
    part = prepared(tmp_path / "cache" / "abc").model_dump(mode="json")
    for name in ("on_long_rows", "long_rows", "dropped_rows", "untrained_rows"):
        del part[name]
    dataset = {"fingerprint": "abc", "parts": [part], "sequence_length": 32}
    (tmp_path / "dataset.json").write_text(json.dumps(dataset))
    job = text_job(tmp_path, data={"columns": {"messages": "m"}})
    found = pinned_dataset(job, tmp_path / "dataset.json")
    assert found is not None
    assert found.samples == 3


def test_eval_text_keeps_its_tokenizer_if_training_needs_none(tmp_path: Path) -> None:
    sources = {"train": {"path": "/a.parquet", "columns": {"input_ids": "ids"}}, "eval": {"path": "/b.jsonl"}}
    job = text_job(tmp_path, data=sources, training={"eval_steps": 1})
    other = evaluation_spec(job, join(job, [Part(fingerprint="x", files=(), tokens=0)], None))
    assert other is not None
    assert other.model.tokenizer == job.model.tokenizer


@pytest.mark.parametrize("damage", ["part-00000.parquet", "index.bin"])
def test_damaged_samples_count_as_missing(tmp_path: Path, damage: str) -> None:
    part = prepared(tmp_path / "cache" / "abc")
    assert load_part(tmp_path / "cache" / "abc") == part
    file = tmp_path / "cache" / "abc" / damage
    file.write_bytes(file.read_bytes()[:-1])
    assert load_part(tmp_path / "cache" / "abc") is None
    (tmp_path / "cache" / "abc" / "dataset.json").write_text("")
    assert load_part(tmp_path / "cache" / "abc") is None


def test_shard_truncated_during_a_run_raises(tmp_path: Path) -> None:
    part = prepared(tmp_path / "abc")
    dataset = Dataset(fingerprint="x", parts=(part,), sequence_length=5)
    shard = Path(part.files[0].path)
    with shard.open("r+b") as file:
        file.truncate(part.files[0].columns["input_ids"] + 22)
    with pytest.raises(OSError, match=r"part-00000.parquet is truncated: it ends at byte"):
        read_rows(dataset, np.array([1]))


def as_it_is(folder: Path, ids: pa.Array, **data: Any) -> JobSpec:
    pq.write_table(pa.table({"ids": ids}), folder / "a.parquet")
    return spec(data={"train": {"path": str(folder / "a.parquet")}} | TOKENS | data)


@pytest.mark.parametrize(
    ("ids", "data"),
    [
        (pa.array([[1], [2]]), {"on_bad_rows": "skip"}),
        (pa.array([[1], None]), {}),
        (pa.array([[1], [2, None]]), {}),
        (pa.array([[1], [384]]), {}),
        (pa.array([[1], [2**40]]), {}),
        (pa.array([[1], [1] * 17]), {}),
        (pa.array([[1], []]), {}),
    ],
)
def test_files_whose_rows_need_checks_are_not_read_directly(
    tmp_path: Path, ids: pa.Array, data: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match="is not prepared in"):
        find_dataset(as_it_is(tmp_path, ids, **data), tmp_path)


def test_vocabulary_decides_which_token_rows_are_invalid(tmp_path: Path) -> None:
    job = as_it_is(tmp_path, pa.array([[1], [383]]))
    assert find_dataset(job, tmp_path).samples == 2
    smaller = job.model_copy(update={"model": job.model.model_copy(update={"config": TINY | {"vocab_size": 383}})})
    assert name_of(job) != name_of(smaller)
    with pytest.raises(DataError, match="is not prepared in"):
        find_dataset(smaller, tmp_path)


def test_only_small_parquet_is_read_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = as_it_is(tmp_path, pa.array([[n] * 16 for n in range(200)], pa.list_(pa.int32())))
    assert find_dataset(job, tmp_path).tokens == 3200
    both = job.model_copy(update={"data": job.data.model_copy(update={"train": job.data.sources * 2})})
    size = pq.read_metadata(tmp_path / "a.parquet").row_group(0).total_byte_size
    monkeypatch.setattr("train_loop.data.prepare.cache._AS_IT_IS_BYTES", size * 3 // 2)
    find_dataset(job, tmp_path)
    with pytest.raises(DataError, match="is not prepared in"):
        find_dataset(both, tmp_path)


def test_damage_to_files_read_directly_is_reported(tmp_path: Path) -> None:
    job = as_it_is(tmp_path, pa.array([[1] * 16] * 100, pa.list_(pa.int32())))
    path, plain = tmp_path / "a.parquet", {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pq.read_table(path), path, write_page_checksum=True, **plain)
    dataset = find_dataset(job, tmp_path)
    content = bytearray(path.read_bytes())
    content[800] = 7
    path.write_bytes(content)
    for read in (lambda: read_rows(dataset, np.arange(2)), lambda: find_dataset(job, tmp_path)):
        with pytest.raises(DataError, match=rf"{path} is not a readable Parquet file: .*CRC checksum"):
            read()


def test_row_that_becomes_invalid_during_a_run_is_reported_with_its_file(tmp_path: Path) -> None:
    job = as_it_is(tmp_path, pa.array([[1], [2]]))
    pq.write_table(pa.table({"ids": [[1], [2]]}), tmp_path / "b.parquet")
    sources = (job.data.sources[0].model_copy(update={"path": str(tmp_path / "*.parquet")}),)
    dataset = find_dataset(job.model_copy(update={"data": job.data.model_copy(update={"train": sources})}), tmp_path)
    pq.write_table(pa.table({"ids": [[1], [1] * 17]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=rf"^{tmp_path}/b.parquet has changed during the run"):
        read_rows(dataset, np.arange(4))
    (part,) = dataset.parts
    changed = part.files[1].model_copy(update={"size": (tmp_path / "b.parquet").stat().st_size})
    dataset = dataset.model_copy(update={"parts": (part.model_copy(update={"files": (part.files[0], changed)}),)})
    with pytest.raises(DataError, match=rf"{tmp_path}/b.parquet, row 1 has 17 tokens, more than sequence_length=16"):
        read_rows(dataset, np.arange(4))


def test_prepared_samples_are_found_at_another_mount_point(tmp_path: Path) -> None:
    part = prepared(tmp_path / "here" / "abc")
    (tmp_path / "here").rename(tmp_path / "there")
    found = load_part(tmp_path / "there" / "abc")
    assert found is not None
    assert found.files[0].path == str(tmp_path / "there" / "abc" / "part-00000.parquet")
    assert found.fingerprint == part.fingerprint
    assert (
        read_rows(Dataset(fingerprint="x", parts=(found,), sequence_length=5), np.arange(3)).lengths.tolist() == [5] * 3
    )


def test_run_whose_samples_were_lost_does_not_resume_with_others(tmp_path: Path) -> None:
    one, other = (
        Dataset(fingerprint=part.fingerprint, parts=(part,), sequence_length=5)
        for part in (prepared(tmp_path / "one"), prepared(tmp_path / "other", first=1))
    )
    pin(one, tmp_path / "pointer.json")
    pin(one, tmp_path / "pointer.json")
    with pytest.raises(
        DataError,
        match=r"lost the samples that the run began with \(one\), and its sources, the rules of preparation or",
    ):
        pin(other, tmp_path / "pointer.json")
    # A chat template that writes the date gives other tokens in equal numbers on another day.
    with pytest.raises(DataError, match=r"again gave other samples, for example if a chat template writes the date"):
        pin(other.model_copy(update={"fingerprint": "one"}), tmp_path / "pointer.json")
    assert Dataset.model_validate_json((tmp_path / "pointer.json").read_bytes()) == one
    without = [part.model_copy(update={"digest": None}) for part in one.parts]
    old, short = (
        one.model_copy(update={"parts": (part,)}) for part in (without[0], without[0].model_copy(update={"tokens": 14}))
    )
    pin(old, tmp_path / "old.json")
    assert pin(one, tmp_path / "old.json") == one
    with pytest.raises(DataError, match="again gave other samples"):
        pin(short, tmp_path / "pointer.json")


def test_run_goes_on_if_other_libraries_give_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    job = text_job(tmp_path / "job")
    before = name_of(job)
    one, same, other = (
        Dataset(
            fingerprint=part.fingerprint,
            parts=(part.model_copy(update={"libraries": library_versions()}),),
            sequence_length=5,
        )
        for part in (prepared(tmp_path / "one"), prepared(tmp_path / "same"), prepared(tmp_path / "other", first=1))
    )
    pin(one, tmp_path / "pointer.json")
    monkeypatch.setattr(
        "train_loop.data.prepare.cache.version", lambda name: "99" if name == "tokenizers" else version(name)
    )
    assert name_of(job) != before
    # The order of samples depends on the fingerprint.
    assert pin(same, tmp_path / "pointer.json").fingerprint == "one"
    with pytest.raises(
        DataError, match=rf"versions of its packages \(tokenizers {version('tokenizers')}, now 99\) have"
    ):
        pin(other, tmp_path / "pointer.json")


def test_clone_takes_the_order_of_its_parent_if_other_versions_give_the_same_samples(tmp_path: Path) -> None:
    one, same, other = (
        Dataset(fingerprint=part.fingerprint, parts=(part,), sequence_length=5)
        for part in (prepared(tmp_path / "one"), prepared(tmp_path / "same"), prepared(tmp_path / "other", first=1))
    )
    parent, heir = RunDir.at(str(tmp_path / "parent")), RunDir.at(str(tmp_path / "heir"))
    assert as_in_parent(same, heir).fingerprint == "same"
    manifest = Manifest(
        step=1,
        tokens=1,
        position=DataPosition(epoch=0, samples=1),
        attempt=1,
        time=0,
        fingerprint="spec",
        dataset="one",
        world=1,
        mesh={},
        versions={},
        files={},
    )
    heir.write_parent(
        Parent(job="p", run_dir=str(parent.root), manifest=manifest, same_order=True, same_optimizer=True)
    )
    assert as_in_parent(same, heir).fingerprint == "same"
    pin(one, parent.data)
    assert [as_in_parent(found, heir).fingerprint for found in (same, other)] == ["one", "other"]


def test_only_sources_read_directly_must_still_exist(tmp_path: Path) -> None:
    job = as_it_is(tmp_path, pa.array([[1], [2]]))
    (mine,) = find_dataset(job, tmp_path).parts
    sources = [*job.data.sources, job.data.sources[0].model_copy(update={"path": "/gone.jsonl"})]
    both = job.model_copy(update={"data": job.data.model_copy(update={"train": tuple(sources)})})
    pin(join(both, [mine, prepared(tmp_path / "abc")], None), tmp_path / "pointer.json")
    found = pinned_dataset(both, tmp_path / "pointer.json")
    assert found is not None
    assert found.samples == 5
