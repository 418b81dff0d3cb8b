"""What the service can say of data before anything runs: place, existence, columns, emptiness."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.specs import TINY, raw_spec
from train_loop.model_folder import model_shape
from train_loop.preflight import check_data, check_model
from train_loop.spec import parse


def problems(root: Path, **data: Any) -> dict[str, str]:
    """Pointer and message of what is wrong with a data block."""
    spec = parse(raw_spec(data=data))
    return {problem.pointer: problem.message for problem in check_data(spec, [f"file://{root}"])}


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"ids": [[1, 2]], "note": ["x"]}), path)
    return path


def test_good_data_has_no_problems(tmp_path: Path, parquet: Path) -> None:
    assert problems(tmp_path, train={"path": f"file://{parquet}"}, columns={"input_ids": "ids"}) == {}
    assert problems(tmp_path, train={"path": "stdlib://*.py"}) == {}


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert problems(tmp_path, train={"path": f"{tmp_path}/none.parquet"}) == {
        "/data/train/path": f"{tmp_path}/none.parquet matches no file; check the path, "
        "which must be visible from service and workers"
    }


@pytest.mark.parametrize("path", ["/etc/*.conf", "file:///etc/hostname"])
def test_a_path_outside_the_allowed_roots(tmp_path: Path, path: str) -> None:
    message = problems(tmp_path, train={"path": path})["/data/train/path"]
    assert message.startswith(f"{path} lies outside the allowed storage roots (")
    assert message.endswith("or have the operator add its folder to TRAINSHED_STORAGE_ROOTS")


@pytest.mark.parametrize("path", ["stdlib://../../../../../etc/hostname", "file:///tmp/../etc/hostname"])
def test_a_path_that_goes_up(tmp_path: Path, path: str) -> None:
    assert "goes up by '..'" in problems(tmp_path, train={"path": path})["/data/train/path"]


def test_a_link_that_leads_outside_the_allowed_roots(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("/etc/hostname")
    assert "lies outside" in problems(tmp_path, train={"path": f"{tmp_path}/*.txt"})["/data/train/path"]


def test_a_relative_path(tmp_path: Path) -> None:
    assert "use an absolute one" in problems(tmp_path, train={"path": "data/x.parquet"})["/data/train/path"]


def test_storage_that_is_not_supported_yet(tmp_path: Path) -> None:
    message = problems(tmp_path, train={"path": "s3://bucket/x.parquet"})["/data/train/path"]
    assert "only file:// storage is supported yet" in message


def test_a_column_that_is_not_in_the_file(tmp_path: Path, parquet: Path) -> None:
    assert problems(tmp_path, train={"path": str(parquet)}, columns={"input_ids": "tokens"}) == {
        "/data/columns": f"{parquet} has no column 'tokens'; it has ids, note; correct data.columns"
    }


def test_a_column_that_is_not_in_the_first_json_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"body": "x"}\n')
    assert "has no column 'text'; it has body" in problems(tmp_path, train={"path": str(path)})["/data/columns"]


def test_an_empty_dataset(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"ids": pa.array([], pa.list_(pa.int32()))}), path)
    assert problems(tmp_path, train={"path": str(path)}, columns={"input_ids": "ids"}) == {
        "/data/train/path": f"{path} holds no rows; an empty dataset cannot be trained on"
    }


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet at all")
    found = problems(tmp_path, train={"path": str(path)}, columns={"input_ids": "ids"})
    assert found["/data/train/path"].startswith(f"{path} is no readable Parquet file")


def test_a_file_whose_ending_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b")
    message = problems(tmp_path, train={"path": str(tmp_path)})["/data/train/path"]
    assert message.startswith(f"{tmp_path}/rows.csv has none of the endings that say what it is (.parquet, ")
    assert "set data.train.format" in message
    assert problems(tmp_path, train={"path": str(tmp_path), "format": "text"}) == {}


def test_files_of_several_formats(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "several formats (parquet, text)" in problems(tmp_path, train={"path": str(tmp_path)})["/data/train/path"]


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = parse(raw_spec(model={"tokenizer": str(tmp_path)}))
    _, (problem,) = check_model(spec, [f"file://{tmp_path}"])
    assert problem.pointer == "/model/tokenizer"
    assert "holds no tokenizer.json" in problem.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hiden_size": 64}, "Qwen3Config has no field hiden_size; did you mean hidden_size?"),
        ({"model_type": "qwen33"}, "builds no causal language model"),
        ({"model_type": "mistral", "sliding_window": 16}, "mistral has sliding_window=16 in all layers"),
        ({"hidden_size": 33, "model_type": "llama", "head_dim": None}, "builds no causal language model"),
    ],
)
def test_a_model_that_cannot_be_built_as_written(config: dict[str, Any], message: str) -> None:
    _, (problem,) = check_model(parse(raw_spec(model={"config": TINY | config})), [])
    assert problem.pointer == "/model/config"
    assert message in problem.message


def test_a_model_that_can_be_built_has_no_problems() -> None:
    spec = parse(raw_spec(model={"config": TINY | {"rope_theta": 1e6, "attention_dropout": 0.1}}))
    shape, found = check_model(spec, [])
    assert (shape, found) == (model_shape(spec.model), [])
