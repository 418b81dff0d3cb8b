"""Preflight helper process: answers, limits and its cache."""

import io
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from service.adapters.helper_processes.preflight import HelperPreflight, Limits
from service.adapters.helper_processes.report_cache import FRESH_SECONDS, cache_key
from service.errors import PreflightFailed, ResultsUnreadable
from service.ports import CallCancelled, Cancellation, PreflightReport
from tests.support.builders.specs import infer_spec, may_read
from tests.support.fakes.service import a_spec
from tests.support.own_code import MODEL, own_spec
from tests.support.waiting import wait_for
from train_loop.plan import read_shape
from train_loop.run_dir import RunDir
from train_loop.spec import Problem, parse_any


@contextmanager
def preflight(answer: str, *, timeout: float = 30.0, limits: Limits | None = None) -> Iterator[HelperPreflight]:
    """Start a preflight whose helper evaluates `answer`, a Python expression that may use `request`."""
    imports = "import os, sys, time\nfrom train_loop.preflight.process.fork_server import set_pointer, serve\n"
    imports += "from train_loop.preflight.process.sandbox import confine\n"
    command = [sys.executable, "-c", f"{imports}serve(lambda request: {answer})"]
    limits = limits or Limits(timeout)
    helper = HelperPreflight(read_policy=lambda _: may_read("file:///data"), limits=limits, command=command)
    try:
        # Its start counts for the timeout of the first check.
        helper.start()
        wait_for(lambda: helper.trouble() is None, "the helper")
        yield helper
    finally:
        helper.stop()


ECHO = (
    "{'problems': [{'pointer': request['spec']['name'], 'message': request['read_policy']['roots'][0]}], 'shape': None}"
)


def test_preflight_receives_spec_and_roots_and_returns_problems() -> None:
    with preflight(ECHO) as helper:
        assert helper.check(a_spec()) == PreflightReport((Problem("tiny", "file:///data"),), None)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("1 / 0", "could not be checked: ZeroDivisionError: division by zero"),
        ("os.abort()", "crashed during the check"),
        ("{'hello': 1}", "could not be checked"),
    ],
)
def test_failed_check_raises_its_reason_and_the_next_check_succeeds(answer: str, message: str) -> None:
    with preflight(f"{answer} if request['spec']['name'] == 'bad' else {ECHO}") as helper:
        for _ in range(2):
            with pytest.raises(PreflightFailed, match=message):
                helper.check(a_spec(name="bad"))
            assert helper.check(a_spec()).problems


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "muon"},
        {"groups": [{"params": ["lm_head"], "lr_scale": 0.1}]},
        {"layer_decay": 0.9},
        {"learning_rate": 0.5},
        {"weight_decay": 0.5},
        {"reproducible": "any_size", "global_batch_size": 4},
        {"router_aux_loss": {"coef": 0.1}},
        {"router_z_loss": 0.1},
        {"chunked_loss": True},
        {"per_device_train_batch_size": 3},
        {"global_batch_size": 4},
        {"label_smoothing_factor": 0.1},
        {"z_loss": 0.1},
    ],
)
def test_result_is_not_reused_for_settings_that_a_check_reads(training: dict[str, object]) -> None:
    assert cache_key(a_spec(training=training)) != cache_key(a_spec())


def test_result_is_not_reused_for_other_resources() -> None:
    assert cache_key(a_spec(scaling={"resources_per_worker": {"GPU": 1}})) != cache_key(a_spec())


def test_result_is_not_reused_for_other_inference() -> None:
    keys = {cache_key(parse_any(infer_spec() | {"infer": {"output": one}})) for one in ("logprobs", "embeddings")}
    assert len(keys) == 2


OWN_CODE = """{
    "exits": lambda: os._exit(3),
    "sleeps": lambda: time.sleep(99),
    "prints": lambda: [os.write(fd, b"x") for fd in (0, 1, 2)] and [] or sorted(os.listdir("/proc/self/fd")),
}"""


def test_own_code_that_ends_or_stops_its_check_is_the_users_problem_and_has_no_open_files() -> None:
    call = f"{OWN_CODE}[request['spec']['name']]()"
    # What is found before the code runs is kept.
    then = "{'then': {'problems': [], 'code': 'x'}}"
    answer = f"[confine(), set_pointer('/code/model'), {{'problems': [{{'pointer': '/code', 'message': str({call})}}], "
    answer = f"{answer} 'shape': None, 'count': None}}][-1] if 'before' in request else {then}"
    with preflight(answer, timeout=3.0) as helper:
        found = {name: helper.check(a_spec(name=name)) for name in ("exits", "sleeps", "prints")}
    ended = "its check was ended by the code (exit code 3); correct the code"
    assert found["exits"].problems == (Problem("/code/model", ended),)
    assert found["sleeps"].problems == (Problem("/code/model", "its check took over 3 s; correct the code"),)
    assert {report.code for report in found.values()} == {"x"}
    # Its streams, the pipe of its answer, and the listing itself.
    (printed,) = found["prints"].problems
    assert printed.message.count("'") == 2 * 5


@pytest.mark.slow
def test_own_code_passes_the_confined_check_of_the_service(tmp_path: Path) -> None:
    """The helper as the service starts it: its sandbox must allow all calls of a check of honest code."""
    policy = may_read(tmp_path.as_uri()).model_copy(update={"code": True})
    helper = HelperPreflight(read_policy=lambda _: policy, limits=Limits(120.0))
    try:
        for number in range(2):
            text = MODEL if number == 0 else MODEL.replace("return Model(**config)", "raise KeyboardInterrupt")
            found = helper.check(parse_any(own_spec(tmp_path / str(number), text)))
            if number == 0:
                assert (found.problems, found.shape is None) == ((), False)
            else:
                assert [(one.pointer, "KeyboardInterrupt" in one.message) for one in found.problems] == [
                    ("/code/model", True)
                ]
            assert len(found.code or "") == 64
    finally:
        helper.stop()


def test_trouble_reports_pending_imports_and_ended_helper_restarts(tmp_path: Path) -> None:
    code = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
    code += "import os\nos.write(0, bytes(1))\ntime.sleep(3600)"
    helper = HelperPreflight(
        read_policy=lambda _: may_read(), limits=Limits(30.0), command=[sys.executable, "-c", code]
    )
    assert helper.trouble() == "is not started"
    helper.start()
    try:
        assert helper.trouble() == "is importing its libraries"
        (tmp_path / "go").touch()
        wait_for(lambda: helper.trouble() is None, "a helper that has done its imports")
        assert helper._helper is not None
        helper._helper.kill()
        helper._helper.wait()
        assert helper.trouble() == "exited with -9 and is restarting"
        wait_for(lambda: helper.trouble() is None, "another helper")
    finally:
        helper.stop()


def test_hanging_check_is_killed_after_timeout() -> None:
    hangs = "set_pointer('/data/train') or time.sleep(3600)"
    with preflight(f"{hangs} if request['spec']['name'] == 'bad' else {ECHO}", timeout=20.0) as helper:
        assert helper.check(a_spec()).problems
        helper._limits = Limits(0.2)
        with pytest.raises(PreflightFailed, match=r"the check of /data/train took over 0\.2 s; check that its storage"):
            helper.check(a_spec(name="bad"))
        assert helper._helper is not None
        here = psutil.Process(helper._helper.pid)
        wait_for(lambda: not here.children(), "the end of the hanging fork")


def test_requester_that_has_gone_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with preflight(f"time.sleep(0.1) or {ECHO}") as helper:
        assert helper.check(a_spec()).problems
        whole = b'{"seconds": 9, "spec": {"name": "x"}, "read_policy": {"roots": [""]}}'
        for question in (b"", b'{"spec": ', b"[" * 100_000, whole):
            with helper._connect() as connection:
                connection.sendall(question)
                connection.shutdown(socket.SHUT_WR)
        assert helper.check(a_spec(name="next")).problems
        assert helper._helper is not None
        here = psutil.Process(helper._helper.pid)
        wait_for(lambda: not here.children(), "the end of the forks")
    assert capfd.readouterr().err == ""


def test_killed_check_leaves_no_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    copies = "[__import__('tempfile').mkdtemp(), os.kill(os.getpid(), 9)]"
    with preflight(f"{copies} if request['spec']['name'] == 'bad' else {ECHO}") as helper:
        assert helper.check(a_spec()).problems
        with pytest.raises(PreflightFailed, match="crashed during the check"):
            helper.check(a_spec(name="bad"))
        assert not list(tmp_path.iterdir())


def test_cancelled_check_ends_and_an_equal_check_that_waits_for_it_runs(tmp_path: Path) -> None:
    first = f"open({str(tmp_path / 'begun')!r}, 'x') and time.sleep(3600)"
    with preflight(f"{first} if not os.path.exists({str(tmp_path / 'begun')!r}) else {ECHO}") as helper:
        cancelled = Cancellation()
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(helper.check, a_spec(), None, cancelled)
            wait_for((tmp_path / "begun").exists, "the first check")
            other = threads.submit(helper.check, a_spec())
            wait_for(lambda: other.running(), "the equal check")
            cancelled.cancel()
            with pytest.raises(CallCancelled):
                one.result(timeout=10)
            assert other.result(timeout=10).problems
        assert helper._helper is not None
        here = psutil.Process(helper._helper.pid)
        wait_for(lambda: not here.children(), "the end of the cancelled fork")


_SMALL = Limits(60.0, cpu_seconds=1.0, memory_bytes=64 << 20)


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        ("[None for _ in iter(int, 1)]", "took over 64 MiB of memory; .* TRAINSHED_PREFLIGHT_MEMORY_BYTES"),
        ("bytearray(100 << 20)", "took over 64 MiB of memory; .* TRAINSHED_PREFLIGHT_MEMORY_BYTES"),
        ("sum(iter(int, 1))", "took over 1 s of CPU time; .* TRAINSHED_PREFLIGHT_CPU_SECONDS"),
    ],
)
def test_check_exceeding_a_limit_is_a_problem_of_its_field(answer: str, rule: str) -> None:
    hostile = f"set_pointer('/data/train/path') or set_pointer('/model') or {answer}"
    with preflight(f"{hostile} if request['spec']['name'] == 'bad' else {ECHO}", limits=_SMALL) as helper:
        ((problem,),) = [helper.check(a_spec(name="bad")).problems]
        assert problem.pointer == "/model"
        assert re.search(rule, problem.message), problem.message
        assert helper.check(a_spec()).problems[0].pointer == "tiny"


def test_helper_has_no_secret_but_credentials_of_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("TRAINSHED_SECRET_KEY", "TRAINSHED_DATABASE_URL", "PGPASSWORD", "OTEL_EXPORTER_OTLP_HEADERS")
    others = ("GITHUB_TOKEN", "WANDB_API_KEY", "SMTP_PASSWORD")
    for name in (*secrets, *others, "TRAINSHED_CACHE", "AWS_SECRET_ACCESS_KEY", "FSSPEC_SFTP_PASSWORD"):
        monkeypatch.setenv(name, "x")
    found = "' '.join(sorted(name for name, value in __import__('os').environ.items() if value == 'x'))"
    with preflight(f"{{'problems': [{{'pointer': '', 'message': {found}}}], 'shape': None}}") as helper:
        left = helper.check(a_spec()).problems[0].message
    assert left == "AWS_SECRET_ACCESS_KEY FSSPEC_SFTP_PASSWORD TRAINSHED_CACHE"


def test_fork_is_killed_first_if_host_runs_out_of_memory() -> None:
    score = "open('/proc/self/oom_score_adj').read().strip()"
    with preflight(f"{{'problems': [{{'pointer': '', 'message': {score}}}], 'shape': None}}") as helper:
        assert helper.check(a_spec()).problems[0].message == "1000"


PAGES = "__import__('train_loop.data.read_results', fromlist=['_']).answer_page(request['results'])"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (PAGES, "the results could not be read: Parquet magic bytes not found"),
        ("os._exit(1)", "the results could not be read: the helper that reads them crashed; see the service's log"),
        ("time.sleep(60)", "the results could not be read: it took over 1 s; check that the storage answers"),
    ],
)
def test_page_of_results_that_cannot_be_read_is_an_error(tmp_path: Path, answer: str, message: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.write_spec(parse_any(infer_spec()))
    run_dir.results.commit(0, b"no Parquet")
    timeout = 1.0 if "1 s" in message else 30.0
    with preflight(answer, timeout=timeout) as helper, pytest.raises(ResultsUnreadable, match=re.escape(message)):
        helper.results(str(tmp_path), after=None, limit=10, cancellation=Cancellation())


def test_page_may_be_larger_than_the_answer_of_a_check(tmp_path: Path) -> None:
    run_dir, schema = RunDir(tmp_path), pa.schema({"row": pa.int64(), "text": pa.large_string()})
    run_dir.write_spec(parse_any(infer_spec()))
    content = io.BytesIO()
    pq.write_table(pa.table({"row": [0, 1], "text": ["x" * 2**25, "y"]}, schema), content)
    run_dir.results.commit(0, content.getvalue())
    with preflight(PAGES) as helper:
        first = json.loads(helper.results(str(tmp_path), after=None, limit=10, cancellation=Cancellation()))
        assert [len(row["text"]) for row in first["data"]] == [2**25]
        rest = json.loads(helper.results(str(tmp_path), after=0, limit=10, cancellation=Cancellation()))
    assert (rest["data"], rest["has_more"]) == ([{"row": 1, "text": "y"}], False)


def committed_results(folder: Path, table: pa.Table) -> None:
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    RunDir(folder).write_spec(parse_any(infer_spec()))
    RunDir(folder).results.commit(0, content.getvalue())


def test_page_of_a_text_that_many_rows_share_needs_the_memory_of_one_row(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array(["x" * 2**24], pa.large_string()))
    committed_results(tmp_path, pa.table({"row": pa.array(range(64), pa.int64()), "text": text}))
    with preflight(PAGES, limits=Limits(60.0, memory_bytes=2**29)) as helper:
        page = json.loads(helper.results(str(tmp_path), after=None, limit=10, cancellation=Cancellation()))
    assert ([row["row"] for row in page["data"]], page["has_more"]) == ([0], True)


def test_page_over_the_limit_of_memory_is_an_error(tmp_path: Path) -> None:
    committed_results(tmp_path, pa.table({"tokens": pa.array([[0] * 2**24], pa.large_list(pa.int64()))}))
    message = "the results could not be read: its check took over 100 MiB of memory; choose .* or have the operator"
    # Threads of Arrow have stacks.
    limits = Limits(60.0, memory_bytes=100 << 20)
    with preflight(PAGES, limits=limits) as helper, pytest.raises(ResultsUnreadable, match=message):
        helper.results(str(tmp_path), after=None, limit=10, cancellation=Cancellation())


def test_helper_ends_with_its_service() -> None:
    ours, theirs = socket.socketpair()
    code = "from train_loop.preflight.process.fork_server import serve\nserve(lambda request: None)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=theirs.fileno()) as helper:
        theirs.close()
        assert ours.recv(1)
        ours.close()
        assert helper.wait(timeout=30) == 0


def test_helper_that_cannot_start_raises_and_killed_helper_restarts() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    broken = HelperPreflight(read_policy=lambda _: may_read(), limits=Limits(30.0), command=command)
    with pytest.raises(PreflightFailed, match="exited with 3; see the service's log"):
        broken.check(a_spec())
    broken.stop()
    with preflight(ECHO) as helper:
        assert helper.check(a_spec()).problems
        assert helper._helper is not None
        helper._helper.kill()
        helper._helper.wait()
        assert helper.check(a_spec()).problems


def test_passed_check_is_cached_for_same_model_data_and_project() -> None:
    shape = asdict(read_shape({"model_type": "qwen3"}))
    with preflight(f"{{'problems': [], 'shape': {{**{shape}, 'layers': os.getpid()}}}}") as helper:
        first = helper.check(a_spec())
        again = helper.check(a_spec(name="other", training={"max_steps": 5}))
        assert again is first
        assert helper.check(a_spec(data={"sequence_length": 64})) is not first
        # Another project may read other files.
        assert helper.check(a_spec(project="other")) is not first


def test_known_returns_only_recent_passed_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = asdict(read_shape({"model_type": "qwen3"}))
    good, bad, ill = a_spec(), a_spec(data={"sequence_length": 64}), a_spec(data={"sequence_length": 256})
    others = f"{{64: {ECHO}, 256: {{'failed': 'no'}}}}"
    found = f"{others}.get(request['spec']['data']['sequence_length'], {{'problems': [], 'shape': {shape}}})"
    with preflight(found) as helper:
        assert helper.cached(good) is None
        first = helper.check(good)
        assert helper.check(bad).problems
        with pytest.raises(PreflightFailed):
            helper.check(ill)
        assert helper.cached(a_spec(name="other")) is first
        assert helper.cached(bad) is None
        assert helper.cached(ill) is None
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + FRESH_SECONDS)
        assert helper.cached(good) is None


def test_concurrent_equal_checks_share_one_answer() -> None:
    shape = asdict(read_shape({"model_type": "qwen3"}))
    slow = f"time.sleep(1) or {{'problems': [], 'shape': {{**{shape}, 'layers': os.getpid()}}}}"
    with preflight(slow) as helper, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(helper.check, [a_spec(name=f"job-{number}") for number in range(8)]))
        assert all(answer is answers[0] for answer in answers)
    with preflight("time.sleep(1) or 1 / 0") as helper, ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(helper.check, a_spec()) for _ in range(8)]
        errors = [one.exception() for one in futures]
        assert all(error is errors[0] and isinstance(error, PreflightFailed) for error in errors)


def test_check_exceeding_its_timeout_is_a_problem_of_its_field() -> None:
    with preflight("set_pointer('/model') or sum(iter(int, 1))", limits=Limits(1.0)) as helper:
        (problem,) = helper.check(a_spec()).problems
        assert problem.pointer == "/model"
        assert "took over 1 s; choose a smaller config" in problem.message
