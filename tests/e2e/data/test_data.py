"""Data preparation on real Ray: no token is lost or repeated, and errors are reported."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.specs import spec
from tests.support.ranks.own_ray import own_ray
from train_loop.data.dataset import IGNORE, Rows
from train_loop.data.masking import mask_rows
from train_loop.data.order import Order
from train_loop.data.prepare.cache import evaluation_spec, find_dataset
from train_loop.data.prepare.pipeline import prepare
from train_loop.data.stream.local import read_rows
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError
from train_loop.faults.failure import failed
from train_loop.spec import JobSpec, override, parse_text


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with own_ray(store_bytes=100_000_000):
        yield


def name_recorder() -> tuple[list[str], Any]:
    """Return a list, and a report function that appends the names of events to it, once for repeated reports."""
    names: list[str] = []

    def report(name: str, **fields: object) -> None:
        # A slow machine reports progress every five seconds.
        if name != "prepare_progress" or names[-1:] != [name]:
            names.append(name)

    return names, report


def text_spec(path: Path, **data: Any) -> JobSpec:
    return spec(data={"train": {"path": str(path)}, "sequence_length": 16} | data)


def documents(rows: Rows) -> list[list[int]]:
    """Return the documents of rows, split where positions restart."""
    found = []
    for ids, places, length in zip(rows.input_ids, rows.position_ids, rows.lengths, strict=True):
        starts = [*np.flatnonzero(places[:length] == 0), length]
        found += [ids[start:stop].tolist() for start, stop in itertools.pairwise(starts)]
    return found


def words(count: int) -> str:
    return " ".join(f"word{i % 97}" for i in range(count))


def test_no_token_of_any_file_is_lost_or_repeated(tmp_path: Path) -> None:
    texts = [words(n) for n in (3, 50, 1, 20, 7)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    dataset = prepare(text_spec(tmp_path / "*.txt"), tmp_path / "_cache", name_recorder()[1])
    assert dataset.tokenizer is not None
    tokenizer = load_tokenizer(dataset.tokenizer)
    expected = [ids[start : start + 16] for ids in tokenizer.encode(texts) for start in range(0, len(ids), 16)]
    found = documents(read_rows(dataset, np.arange(dataset.samples)))
    assert sorted(found) == sorted(expected), "a fitting document is cut, or attends to the previous one"
    assert dataset.tokens == sum(map(len, expected))
    assert dataset.utilisation == dataset.tokens / (16 * dataset.samples)


def test_jsonl_and_parquet_give_the_same_samples(tmp_path: Path) -> None:
    texts = [words(n) for n in (30, 5, 12)]
    lines = "\n".join(json.dumps({"body": text, "other": 1}) for text in texts)
    (tmp_path / "rows.jsonl").write_text(lines)
    pq.write_table(pa.table({"body": texts}), tmp_path / "rows.parquet")
    columns = {"columns": {"text": "body"}}
    both = [
        prepare(text_spec(tmp_path / name, **columns), tmp_path / "_cache", name_recorder()[1])
        for name in ("rows.jsonl", "rows.parquet")
    ]
    first, second = (read_rows(dataset, np.arange(dataset.samples)) for dataset in both)
    assert np.array_equal(first.input_ids, second.input_ids)
    assert both[0].fingerprint != both[1].fingerprint


def test_second_job_reuses_prepared_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(40))
    names, report = name_recorder()
    first = prepare(text_spec(tmp_path / "a.txt"), tmp_path / "_cache", report)
    assert prepare(text_spec(tmp_path / "a.txt"), tmp_path / "_cache", report) == first
    assert names == ["training_tokenizer", "preparing", "prepare_progress"]
    assert find_dataset(text_spec(tmp_path / "a.txt"), tmp_path / "_cache") == first
    longer = prepare(text_spec(tmp_path / "a.txt", sequence_length=8), tmp_path / "_cache", report)
    assert longer.fingerprint != first.fingerprint


def test_damaged_and_uncommitted_caches_are_rebuilt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(40))
    job, cache = text_spec(tmp_path / "a.txt"), tmp_path / "_cache"
    first = prepare(job, cache, name_recorder()[1])
    folder = cache / first.fingerprint
    faults: tuple[Callable[[], object], ...] = (
        lambda: Path(first.parts[0].files[0].path).write_bytes(b"cut short"),
        lambda: folder.rename(folder.with_name(f"{folder.name}.tmp-dead")),
    )
    for fault in faults:
        fault()
        names, report = name_recorder()
        assert prepare(job, cache, report) == first
        assert names == ["preparing", "prepare_progress"]
        assert read_rows(first, np.arange(1)).lengths[0] > 0


def test_eval_data_is_tokenised_like_the_training_data(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(words(80))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": "other " + words(20)}))
    sources = {"train": {"path": str(tmp_path / "train.txt")}, "eval": {"path": str(tmp_path / "eval.jsonl")}}
    both = spec(data=sources | {"sequence_length": 16}, training={"eval_steps": 1})
    cache = tmp_path / "_cache"
    train = prepare(both, cache, name_recorder()[1])
    other = evaluation_spec(both, train)
    assert other is not None
    evaluation = prepare(other, cache, name_recorder()[1])
    assert find_dataset(other, cache) == evaluation
    assert train.tokenizer is not None
    assert evaluation.tokenizer == train.tokenizer
    rows = read_rows(evaluation, np.arange(evaluation.samples))
    found = rows.input_ids[np.arange(16) < rows.lengths[:, None]].tolist()
    assert found == load_tokenizer(train.tokenizer).encode(["other " + words(20)])[0]
    # The same files in the tokens of other training data are another dataset.
    (tmp_path / "train.txt").write_text(words(81).upper())
    again = evaluation_spec(both, prepare(both, cache, name_recorder()[1]))
    assert again is not None
    assert prepare(again, cache, name_recorder()[1]).fingerprint != evaluation.fingerprint


def test_text_of_the_example_of_masked_models_gets_a_mask_and_no_eos(tmp_path: Path) -> None:
    texts = [words(n) for n in (60, 9)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    job = override(parse_text(Path("examples/masked.yaml").read_text()), {"data": {"train": {"path": f"{tmp_path}/*"}}})
    dataset = prepare(job, tmp_path / "_cache", name_recorder()[1])
    tokenizer, length = load_tokenizer(str(dataset.tokenizer)), job.data.sequence_length
    rows = read_rows(dataset, np.arange(dataset.samples))
    whole = tokenizer.encode_plainly(texts)
    assert documents(rows) == [ids[start : start + length] for ids in whole for start in range(0, len(ids), length)]
    masked = mask_rows(rows, dataset, 0)
    assert masked is not None
    chosen = masked.labels != IGNORE
    assert np.array_equal(masked.input_ids[~chosen], rows.input_ids[~chosen])
    assert 0 < (masked.input_ids == tokenizer.mask).sum() <= chosen.sum() < rows.lengths.sum()
    assert not (rows.input_ids == tokenizer.mask).any()


def test_tokenised_parquet_is_read_directly(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [[1] * 16, [2] * 16, [3] * 9]}), tmp_path / "a.parquet")
    plain = text_spec(tmp_path / "a.parquet", columns={"input_ids": "ids"}, packing=False)
    dataset = prepare(plain, tmp_path / "_cache", name_recorder()[1])
    assert [file.path for part in dataset.parts for file in part.files] == [str(tmp_path / "a.parquet")]
    assert read_rows(dataset, np.arange(3)).input_ids[:, 0].tolist() == [1, 2, 3]
    assert not (tmp_path / "_cache").exists()


def test_tokenised_rows_are_packed_with_their_labels(tmp_path: Path) -> None:
    table = pa.table({"ids": [[1] * 10, [2] * 6, [3] * 9], "targets": [[-100] * 10, [2] * 6, [3] * 9]})
    pq.write_table(table, tmp_path / "a.parquet")
    packed = text_spec(tmp_path / "a.parquet", columns={"input_ids": "ids", "labels": "targets"})
    rows = read_rows(prepare(packed, tmp_path / "_cache", name_recorder()[1]), np.arange(2))
    assert rows.input_ids[0].tolist() == [1] * 10 + [2] * 6
    assert rows.labels[0].tolist() == [-100] * 10 + [2] * 6
    assert rows.labels[1].tolist() == [3] * 9 + [-100] * 7


def test_names_of_the_classes_of_tokens_become_numbers(tmp_path: Path) -> None:
    ids, tags = [[1, 2, 3], [4, 5]], [["b", "o", "b"], ["o", "b"]]
    pq.write_table(pa.table({"ids": ids, "tags": tags}), tmp_path / "a.parquet")
    lines = [json.dumps({"ids": one, "tags": [-100, *names[1:]]}) for one, names in zip(ids, tags, strict=True)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    sources = [{"path": str(tmp_path / name)} for name in ("a.parquet", "b.jsonl")]
    job = spec(
        model={"head": {"token_classification": {"labels": 2, "names": ["o", "b"]}}},
        data={"train": sources, "columns": {"input_ids": "ids", "labels": "tags"}, "packing": False}
        | {"sequence_length": 4},
    )
    rows = read_rows(prepare(job, tmp_path / "_cache", name_recorder()[1]), np.arange(4))
    assert rows.labels.tolist() == [
        [1, 0, 1, -100],
        [0, 1, -100, -100],
        [-100, 0, 1, -100],
        [-100, 1, -100, -100],
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good \xff bad", "a.txt: not UTF-8 text: .* correct the row, or set on_bad_rows: skip"),
        (b"", "holds no tokens; an empty dataset cannot be trained on"),
    ],
)
def test_invalid_text_is_a_data_error_that_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare(text_spec(tmp_path / "a.txt"), tmp_path / "_cache", name_recorder()[1])
    outcome = failed(caught.value)
    assert (outcome.code, outcome.retryable) == ("data_error", False)
    assert str(tmp_path / "a.txt") in str(outcome.reason)
    left = [path.name for path in (tmp_path / "_cache").iterdir() if path.suffix != ".lock"]
    assert all(name.startswith("tokenizer-") and ".tmp-" not in name for name in left), "an incomplete cache remains"


def test_model_folder_provides_its_tokenizer(tmp_path: Path) -> None:
    folder, texts = write_model(tmp_path / "m"), ["ab", "c"]
    write_tokenizer(folder)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    model = {"config": None, "path": folder.as_uri()}
    job = spec(data={"train": {"path": str(tmp_path / "rows.jsonl")}, "sequence_length": 5}, model=model)
    dataset = prepare(job, tmp_path / "_cache", name_recorder()[1])
    assert dataset.tokenizer == str(folder)
    tokens = [token for ids in load_tokenizer(str(folder)).encode(texts) for token in ids]
    assert read_rows(dataset, np.arange(1)).input_ids.tolist() == [tokens]


def test_invalid_rows_are_rejected_by_line_or_skipped_and_listed(tmp_path: Path) -> None:
    rows = [json.dumps({"text": words(n)}) for n in (5, 9, 3)]
    (tmp_path / "a.jsonl").write_text("\n".join([rows[0], "oops", "", rows[1], '{"text": null}', rows[2]]))
    with pytest.raises(
        DataError, match=r"a.jsonl, line 2: invalid JSON: .*; correct the row, or set on_bad_rows: skip"
    ):
        prepare(text_spec(tmp_path / "a.jsonl"), tmp_path / "_cache", name_recorder()[1])
    events: list[dict[str, Any]] = []
    skipping = text_spec(tmp_path / "a.jsonl", on_bad_rows="skip")
    dataset = prepare(skipping, tmp_path / "_cache", lambda name, **fields: events.append({"event": name} | fields))
    (skipped,) = [event for event in events if event["event"] == "bad_rows_skipped"]
    assert skipped["count"] == dataset.parts[0].bad_rows == 2
    assert skipped["rows"][0].startswith(f"{tmp_path}/a.jsonl, line 2: invalid JSON: ")
    assert skipped["rows"][1] == f"{tmp_path}/a.jsonl, line 5: column 'text' holds null where text is needed"
    assert dataset.tokenizer is not None
    expected = load_tokenizer(dataset.tokenizer).encode([words(n) for n in (5, 9, 3)])
    assert dataset.tokens == sum(map(len, expected))


def test_long_and_untrained_rows_are_dropped_and_counted_and_answers_keep_their_questions(tmp_path: Path) -> None:
    rows = [{"q": words(2), "a": words(3)}, {"q": words(40), "a": words(1)}, {"q": "", "a": ""}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"prompt": "q", "response": "a"}

    def prepared(rule: str | None) -> tuple[list[int], Rows]:
        dataset = prepare(
            text_spec(tmp_path / "a.jsonl", columns=columns, on_long_rows=rule), tmp_path / "_cache", name_recorder()[1]
        )
        part = dataset.parts[0]
        counts = [part.rows, part.long_rows, part.dropped_rows, part.untrained_rows]
        return counts, read_rows(dataset, np.arange(dataset.samples))

    counts, dropped = prepared(None)
    assert counts == [3, 1, 1, 1]
    assert len(documents(dropped)) == 1
    counts, cut = prepared("truncate_left")
    assert counts == [3, 1, 0, 1]
    assert sorted(map(len, documents(cut)))[1] == 16
    counts, split = prepared("split")
    assert counts == [3, 1, 0, 1]
    assert len(documents(split)) > 2
    with pytest.raises(
        DataError, match=r"a.jsonl, line 2 has \d+ tokens, more than sequence_length=16, and on_long_rows is fail"
    ):
        prepared("fail")
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[1]))
    with pytest.raises(DataError, match="holds no tokens: of 1 rows, 1 were dropped as longer than sequence_length"):
        prepared(None)


def test_sources_of_different_formats_are_mixed_and_prepared_once_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(300))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"q": words(3), "a": words(9), "w": 2}) for _ in range(40)))
    answers = {"path": str(tmp_path / "b.jsonl"), "columns": {"prompt": "q", "response": "a", "weight": "w"}}

    def mixed(*weights: float) -> JobSpec:
        sources: list[dict[str, Any]] = [{"path": str(tmp_path / "a.txt")}, answers]
        return spec(
            data={
                "train": [source | {"weight": w} for source, w in zip(sources, weights, strict=True)],
                "sequence_length": 48,
            }
        )

    names, report = name_recorder()
    dataset = prepare(mixed(1, 3), tmp_path / "_cache", report)
    assert names == ["training_tokenizer", *["preparing", "prepare_progress"] * 2]
    assert dataset.mixture is not None
    assert dataset.mixture.quotas == (2500, 7500)
    text, _ = dataset.parts
    order = Order(dataset.epoch_samples, 0, True, dataset.fingerprint, 10**9, dataset.mixture)
    rows = read_rows(dataset, order.at(np.arange(8)))
    assert (rows.samples < text.samples).sum() == 2
    assert rows.weights is not None
    for row in range(8):
        whole = rows.samples[row] < text.samples
        length = rows.lengths[row]
        assert (rows.labels[row][:length] == -100).any() != whole
        assert set(rows.weights[row][:length].tolist()) == ({1.0} if whole else {2.0})
    # Other weights give another run of the same samples.
    again = prepare(mixed(1, 1), tmp_path / "_cache", report)
    assert len(names) == 5
    assert again.parts == dataset.parts
    assert again.fingerprint != dataset.fingerprint
    assert find_dataset(mixed(1, 3), tmp_path / "_cache") == dataset


def test_file_changed_during_preparation_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": words(9)}))

    def report(event: str, **fields: Any) -> None:
        if event == "preparing":
            (tmp_path / "a.jsonl").write_text(json.dumps({"text": words(8)}))

    with pytest.raises(DataError, match=r"a.jsonl or its tokenizer changed during preparation; restart"):
        prepare(text_spec(tmp_path / "a.jsonl"), tmp_path / "_cache", report)
    assert not list((tmp_path / "_cache").glob("*/dataset.json"))


def test_tokenizer_changed_during_use_is_not_committed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": words(9)}))

    def report(event: str, **fields: Any) -> None:
        if event == "preparing":
            write_tokenizer(tmp_path / "tokenizer", words=301)

    job = spec(data={"train": {"path": str(tmp_path / "a.jsonl")}}, model={"tokenizer": str(tmp_path / "tokenizer")})
    with pytest.raises(DataError, match=r"a.jsonl or its tokenizer changed during preparation; restart"):
        prepare(job, tmp_path / "_cache", report)
    assert not list((tmp_path / "_cache").glob("*/dataset.json"))


def test_lone_surrogate_is_an_invalid_row_to_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}\n' + json.dumps({"text": words(9)}))
    with pytest.raises(DataError, match=r"a.jsonl, line 1: column 'text' holds text that is not Unicode"):
        prepare(text_spec(tmp_path / "a.jsonl", on_bad_rows="fail"), tmp_path / "_cache", name_recorder()[1])
    dataset = prepare(text_spec(tmp_path / "a.jsonl", on_bad_rows="skip"), tmp_path / "_cache", name_recorder()[1])
    assert dataset.parts[0].bad_rows == 1


def test_small_tokenised_data_follows_the_same_rules(tmp_path: Path) -> None:
    ids = [[1] * 16, [2] * 20, [], [3] * 9]
    pq.write_table(pa.table({"ids": ids}), tmp_path / "a.parquet")
    plain = text_spec(tmp_path / "a.parquet", columns={"input_ids": "ids"}, packing=False)
    rows = read_rows(prepare(plain, tmp_path / "_cache", name_recorder()[1]), np.arange(4))
    assert rows.lengths.tolist() == [16, 16, 4, 9]
    for wrong, message in (
        (None, "null where a list of whole numbers"),
        ([2, 384], "384 at position 1, which is not in the"),
    ):
        pq.write_table(pa.table({"ids": [[1], wrong]}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=rf"a.parquet, row 1: column 'ids' holds {message}"):
            prepare(plain, tmp_path / "_cache", name_recorder()[1])
