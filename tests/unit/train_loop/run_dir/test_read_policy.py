"""Read policy of a project's jobs, and links that replace a checked file."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import ones

from tests.support.builders.folders import write_model, write_tokenizer
from train_loop.data.files import File, open_file
from train_loop.data.prepare.sources import check_allowed
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError
from train_loop.model.folder import model_config
from train_loop.model.load import open_tensors, read_headers
from train_loop.run_dir import READ_POLICY_VARIABLE, ReadPolicy
from train_loop.spec import ModelSpec
from train_loop.system.input_files import current_policy, limit_inputs, open_input

JOB = "job-01m89aapeeqbdt7xysvprv3021"
NLP = ReadPolicy(
    project="nlp",
    roots=("s3://runs", "s3://nlp/", "sftp://user:secret@host/data"),
    runs=("s3://runs",),
    caches=("/srv/runs/_cache",),
)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("s3://nlp/a.jsonl", None),
        ("s3://nlp", None),
        ("s3://nlp-secret/a.jsonl", "lies outside the allowed storage roots"),
        ("s3://vision/a.jsonl", "lies outside the allowed storage roots"),
        ("sftp://other@host/data/a", None),
        (f"s3://runs/nlp/{JOB}/export/model.safetensors", None),
        (f"s3://runs/vision/{JOB}/export/model.safetensors", "lies in the run directory of a job"),
        (f"s3://runs/vision/{JOB}", "that is not one of project 'nlp'; clone"),
        ("s3://runs/corpus/job-descriptions.jsonl", None),
        ("s3://runs/corpus", None),
    ],
)
def test_project_reads_its_roots_and_run_directories(place: str, reason: str | None) -> None:
    refusal = NLP.refusal(place, named="it")
    assert refusal is None if reason is None else reason in (refusal or "")
    assert "secret@" not in (refusal or "")


AZURE = "abfss://nlp@acct.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("root", "place", "permitted"),
    [
        (f"{AZURE}/data", f"{AZURE}/data/a", True),
        (f"{AZURE}/data", "abfss://secret@acct.dfs.core.windows.net/data/a", False),
        (f"{AZURE}/data", "abfss://nlp@other.dfs.core.windows.net/data/a", False),
        (f"{AZURE}/data", "abfss://acct.dfs.core.windows.net/data/a", False),
        (f"{AZURE}/data", "abfs://nlp@acct.dfs.core.windows.net/data/a", False),
        ("az://nlp/data", "az://x@nlp/data/a", False),
        ("wasbs://nlp@acct/data", "wasbs://secret@acct/data/a", False),
        ("s3://nlp/data", "s3://nlp/data/a", True),
        ("s3://nlp/data", "s3://key@nlp/data/a", False),
        ("s3://nlp/data", "s3://key:secret@nlp/data/a", False),
        ("s3://nlp/data", "S3://nlp/data/a", False),
        ("s3://nlp/data", "s3a://nlp/data/a", False),
        ("s3://nlp/data", "s3://NLP/data/a", False),
        ("s3://nlp/data", "s3://nlp/Data/a", False),
        ("s3://nlp/data", "s3://nlp//data/a", False),
        ("s3://nlp/data", "s3://nlp/data//a", True),
        ("s3://nlp/data", "s3://nlp/da%74a/a", False),
        ("s3://nlp/data", "s3://nlp/./data/a", False),
        ("gs://nlp", "gs://x@nlp/a", False),
        ("gs://nlp", "gs://nlp@x/a", False),
        ("sftp://me:pw@host/data", "sftp://host/data/a", True),
        ("sftp://me:pw@host/data", "sftp://you@host/data/a", True),
        ("sftp://host/data", "sftp://host@evil/data/a", False),
        ("sftp://host/data", "sftp://evil#@host/data/a", False),
        ("sftp://host/data", "sftp://evil?@host/data/a", False),
        ("sftp://host/data", "sftp://evil\\@host/data/a", False),
        ("sftp://host/data", "sftp://a@b@host/data/a", False),
        ("sftp://host/data", "sftp://host:2222/data/a", False),
        ("sftp://host:22/data", "sftp://host:22/data/a", True),
        ("https://host/data", "https://host.evil/data/a", False),
        ("https://host/data", "http://host/data/a", False),
        ("file:///data", "/data/a", True),
        ("/data", "/data/a", True),
        ("/data", "/database/a", False),
        ("/data", "FILE:///data/a", False),
    ],
)
def test_root_permits_its_own_container_host_and_folder_only(root: str, place: str, permitted: bool) -> None:
    refusal = ReadPolicy(project="nlp", roots=(root,)).refusal(place, named="it")
    assert (refusal is None) == permitted
    in_job = ReadPolicy(project="nlp", roots=(root,)).without_users().refusal(place, named="it")
    assert (in_job is None) == permitted, "a job's processes apply the policy of the service"


@pytest.mark.parametrize("root", ["s3://key:secret@nlp", "sftp://me:secret@host/data", "new://me:secret@host/data"])
def test_passwords_of_any_scheme_are_hidden(root: str) -> None:
    policy = ReadPolicy(project="nlp", roots=(root,))
    assert "secret" not in policy.without_users().model_dump_json() + str(policy.refusal("/x", named="it"))


@pytest.mark.parametrize("below", ["vision", "/vision", "./vision", "%76ision", "vision/", "vision/.", "VISION"])
@pytest.mark.parametrize("job", [JOB, JOB.upper(), JOB.replace("j", "%6a")])
def test_run_directory_of_another_project_is_recognised_as_servers_read_it(below: str, job: str) -> None:
    assert NLP.hides(f"s3://runs/{below}/{job}/export/model.safetensors")


def test_job_environment_contains_no_passwords() -> None:
    text = NLP.without_users().model_dump_json()
    assert "secret" not in text
    assert "sftp://host/data" in text


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in which jobs may read `root`, but neither `outside` nor other projects' run directories."""
    for name in ("root", "outside", "root/_cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside/secret.jsonl").write_text('{"text": "secret"}\n')
    root = (tmp_path / "root").as_uri()
    with limit_inputs(ReadPolicy(project="nlp", roots=(root,), runs=(root,), caches=(f"{root}/_cache",))):
        yield tmp_path


def swapped(inside: Path, outside: Path) -> Path:
    """Replace a file with a link to another, as an attacker may after the checks."""
    inside.unlink(missing_ok=True)
    inside.symlink_to(outside)
    return inside


def test_link_that_replaces_a_data_file_is_not_read(roots: Path) -> None:
    place = roots / "root/a.jsonl"
    place.write_text('{"text": "mine"}\n')
    with open_file(File(str(place), 17, "1")) as opened:
        assert opened.read() == b'{"text": "mine"}\n'
    swapped(place, roots / "outside/secret.jsonl")
    with pytest.raises(DataError, match=f"{place} lies outside the allowed storage roots"):
        open_file(File(str(place), 17, "1"))


def test_link_that_replaces_a_folder_is_not_followed(roots: Path) -> None:
    folder = roots / "root/data"
    folder.symlink_to(roots / "outside")
    with pytest.raises(DataError, match="lies outside"):
        open_input(folder / "secret.jsonl")


def test_link_within_the_roots_is_read(roots: Path) -> None:
    (roots / "root/a.jsonl").write_text("x")
    (roots / "root/b.jsonl").symlink_to(roots / "root/a.jsonl")
    with open_input(roots / "root/b.jsonl") as opened:
        assert opened.read() == b"x"


def test_link_to_the_run_directory_of_another_project_is_not_followed(roots: Path) -> None:
    theirs = roots / "root/vision" / JOB / "export"
    theirs.mkdir(parents=True)
    (theirs / "a.jsonl").write_text("x")
    link = swapped(roots / "root/a.jsonl", theirs / "a.jsonl")
    for place in (theirs / "a.jsonl", link):
        with pytest.raises(DataError, match=f"{place} lies in the run directory of a job that is not one of project"):
            open_input(place)
        with pytest.raises(DataError, match="lies in the run directory of a job that is not one of project 'nlp'"):
            check_allowed(place.as_uri(), own())
    with pytest.raises(DataError, match=f"{link} is a link to a place that jobs of project 'nlp' may not read"):
        check_allowed(f"file://{roots}/root/**/*.jsonl", own())


def test_cache_is_readable_only_by_its_own_paths(roots: Path) -> None:
    (roots / "root/_cache/a.jsonl").write_text("x")
    open_input(roots / "root/_cache/a.jsonl").close()
    with pytest.raises(DataError, match="lies in the cache of prepared data"):
        open_input(swapped(roots / "root/a.jsonl", roots / "root/_cache/a.jsonl"))
    with pytest.raises(DataError, match="lies in the cache of prepared data"):
        check_allowed(f"file://{roots}/root/_cache/a.jsonl", own())


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: model_config(ModelSpec(path=folder.as_uri()))),
        ("tokenizer.json", lambda folder: load_tokenizer(str(folder))),
        ("tokenizer_config.json", lambda folder: load_tokenizer(str(folder))),
        ("model.safetensors", read_headers),
    ],
)
def test_link_that_replaces_a_model_file_is_not_read(roots: Path, name: str, read: Callable[[Path], object]) -> None:
    folder = roots / "root/model"
    write_model(folder)
    write_tokenizer(folder)
    read(folder)
    load_tokenizer.cache_clear()
    (folder / name).rename(roots / "outside" / name)
    swapped(folder / name, roots / "outside" / name)
    with pytest.raises(DataError, match=f"{folder / name} lies outside the allowed storage roots"):
        read(folder)


def test_tensors_come_from_the_checked_file(roots: Path) -> None:
    place = roots / "root/a.safetensors"
    save_file({"w": ones(3)}, place)
    with open_tensors(place) as file:
        swapped(place, roots / "outside/secret.jsonl")
        assert file.get_slice("w")[:].tolist() == [1.0, 1.0, 1.0]


def test_job_process_applies_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(READ_POLICY_VARIABLE, raising=False)
    assert current_policy() is None
    monkeypatch.setenv(READ_POLICY_VARIABLE, json.dumps({"project": "nlp", "roots": ["s3://nlp"], "later": 1}))
    assert current_policy() == ReadPolicy(project="nlp", roots=("s3://nlp",))


def own() -> ReadPolicy:
    found = current_policy()
    assert found is not None
    return found
