"""Preflight by the real helper process: a model in a folder, hostile files and unavailable storage."""

import gzip
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from service.adapters.helper_processes.preflight import HelperPreflight, Limits
from service.errors import StorageAway
from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.searches import drawn
from tests.support.builders.specs import TINY, may_read
from tests.support.fakes.service import a_spec
from tests.support.servers.s3 import S3Server, s3_server
from tests.support.turns import turns
from train_loop.plan import read_shape

in_turn = turns(["storage", "gzip"], 1)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def helper(s3: S3Server) -> Iterator[HelperPreflight]:
    """Start the real helper with small limits. All tests share it, because its imports take five CPU seconds."""
    limits = Limits(100.0, cpu_seconds=10.0, memory_bytes=1 << 30)
    one = HelperPreflight(read_policy=lambda _: may_read("file:///", "s3://corpus"), limits=limits)
    with pytest.MonkeyPatch.context() as variables:
        for name, value in s3.environment().items():
            variables.setenv(name, value)
        one.start()
    yield one
    one.stop()


def test_real_helper_returns_shape_of_model_in_a_folder(helper: HelperPreflight, tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path))
    spec = a_spec(model={"config": None, "path": tmp_path.as_uri()})
    found = helper.check(spec)
    assert found.shape is not None
    assert found.shape.counts is not None
    assert (found.problems, replace(found.shape, counts=None, tiles=None, built=None, rotated=None)) == (
        (),
        read_shape(TINY),
    )
    assert found.shape.built is not None
    units = {one.module for one in found.shape.built.units}
    assert units == {"Embedding", "Qwen3ForCausalLM", "Qwen3DecoderLayer", "Linear"}


TEMPLATES = [
    ("{{ 'a'*2000000000 }}", "MiB of memory"),
    # Which limit a billion characters meet first depends on the speed and the memory of the machine.
    ("{{ '%1000000000d' % 1 }}", "characters of 2 messages|MiB of memory|s of CPU time"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "s of CPU time"),
]


@pytest.mark.parametrize(("template", "rule"), drawn(TEMPLATES, 1))
def test_chat_template_exceeding_a_limit_is_a_problem_of_its_field(
    helper: HelperPreflight, tmp_path: Path, template: str, rule: str
) -> None:
    write_tokenizer(write_model(tmp_path))
    (tmp_path / "chat_template.jinja").write_text(template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    data = {"train": {"path": str(rows)}, "columns": {"messages": "messages"}}
    spec = a_spec(model={"config": None, "path": tmp_path.as_uri()}, data=data)
    ((problem,),) = [helper.check(spec).problems]
    assert problem.pointer == "/model/tokenizer"
    assert re.search(rule, problem.message), problem.message


@in_turn("gzip")
def test_gzip_bomb_is_a_problem_of_its_field(helper: HelperPreflight, tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path))
    # Of 2 GiB: a gzip file may have several members.
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"a" * 2**24, compresslevel=1) * 128)
    spec = a_spec(
        model={"config": None, "path": tmp_path.as_uri()},
        data={"train": {"path": str(tmp_path / "a.jsonl.gz")}, "columns": {"text": "text"}},
    )
    (problem,) = helper.check(spec).problems
    assert problem.pointer.startswith("/data/")
    assert "MiB" in problem.message


@in_turn("storage")
@pytest.mark.slow
def test_data_on_unavailable_storage_raises_storage_away_within_seconds(
    helper: HelperPreflight, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A check imports the packages of the storage, too.
    monkeypatch.setattr(helper, "_limits", Limits(100.0))
    s3.bucket("corpus")
    s3.put("corpus/a.jsonl", b'{"ids": [1, 2]}\n')
    spec = a_spec(data={"train": {"path": "s3://corpus/a.jsonl"}, "columns": {"input_ids": "ids"}})
    assert helper.check(spec).problems == ()
    other = a_spec(data={"train": {"path": "s3://corpus/b.jsonl"}, "columns": {"input_ids": "ids"}})
    message = r"s3://corpus/b\.jsonl has been unavailable: it has failed for 5 s"

    def raises_storage_away() -> None:
        began = time.monotonic()
        with pytest.raises(StorageAway, match=message):
            helper.check(other)
        assert time.monotonic() - began < 60

    with s3.refuse():
        raises_storage_away()
    with s3.gone():
        raises_storage_away()
