"""Preflight checks of a spec's data and model before submission; a helper process of the service.

`python -m train_loop.preflight.checks` receives requests on its standard input, a socket of the service. A request is
{"spec": …, "read_policy": {…}, "parent": … or null, "seconds": …}, the answer {"problems": [{"pointer", "message"}],
"shape": {…}, "preview": […], "count": {…}, "largest": {…}, "lora": {…}, "notes": […]}. `shape` has the model's sizes,
or is null if they are unknown; `lora` has the settings of the adapters that the spec names. If storage is unavailable,
the answer is {"unavailable": {"root", "error"}}. A request {"results": …, "seconds": …} reads a page of results. A
separate process spares the service torch's memory and import time. It forks for each request, because a damaged file
may crash the library that opens it.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch

from train_loop.data.files import is_local, storage_patience
from train_loop.data.own_columns import own_columns
from train_loop.data.prepare.largest_read import largest_read
from train_loop.data.prepare.rows import check_columns, is_empty
from train_loop.data.prepare.sources import check_allowed, list_files
from train_loop.data.read_results import answer_page
from train_loop.errors import DataError
from train_loop.model.sentence.rule import prompt_note
from train_loop.plan import LargestRead, Preview
from train_loop.preflight.adapters import AdaptedSpec, read_settings
from train_loop.preflight.call_sizes import measure_call
from train_loop.preflight.model import check_model
from train_loop.preflight.own_code import check_calls, import_code, read_code
from train_loop.preflight.preview import PREVIEWED_SOURCES, preview_source
from train_loop.preflight.process.fork_server import MISTAKES, message_of, serve, set_pointer
from train_loop.preflight.process.sandbox import confine
from train_loop.preflight.sample_count import count_samples
from train_loop.preflight.tokenizer import absent_tokens
from train_loop.run_dir import Parent, ReadPolicy, StorageUnavailable, local_path
from train_loop.spec import ColumnsSpec, DataSpec, JobSpec, Problem, SourceSpec, parse_any
from train_loop.system.input_files import limit_inputs

_STORAGE_SECONDS = 5.0
"""Seconds to retry failed storage, while a user waits."""


def check_data(spec: JobSpec, policy: ReadPolicy) -> list[Problem]:
    """Return the problems of a spec's data: path, existence, columns, empty files."""
    data = spec.data
    problems = []
    for place, source in _pointed_sources(data):
        pointers = (f"{place}/path", f"{place}/columns" if source.columns else "/data/columns")
        skip = data.on_bad_rows == "skip"
        problems += _source_problems(source, data.columns_of(source), policy, pointers, skip=skip)
    return problems


def _pointed_sources(data: DataSpec) -> Iterator[tuple[str, SourceSpec]]:
    """Yield all sources of training and eval data with their JSON pointers."""
    for name, written, sources in (("train", data.train, data.sources), ("eval", data.eval, data.eval_sources)):
        for number, source in enumerate(sources):
            yield f"/data/{name}/{number}" if isinstance(written, tuple) else f"/data/{name}", source


def _source_problems(
    source: SourceSpec, columns: ColumnsSpec, policy: ReadPolicy, pointers: tuple[str, str], *, skip: bool
) -> list[Problem]:
    """Return the problems of one source; `pointers` are those of its path and its columns."""
    set_pointer(pointers[0])
    try:
        for uri in source.paths:
            check_allowed(uri, policy)
        files = list_files(source)
        if all(is_empty(file) for file in files):
            raise DataError(f"{', '.join(source.paths)} holds no rows; an empty dataset cannot be trained on")
    except MISTAKES as error:
        return [Problem(pointers[0], message_of(error))]
    try:
        if columns.own:
            own_columns(files, columns.own)
        else:
            check_columns(files, columns, skip=skip)
    except DataError as error:
        return [Problem(pointers[1], str(error))]
    return []


def _preview(spec: JobSpec) -> tuple[list[Preview], list[Problem]]:
    """Return the effects of preparation on the first rows, and the rows that would end the job."""
    previews, problems = [], []
    for place, source in islice(_pointed_sources(spec.data), PREVIEWED_SOURCES):
        set_pointer(f"{place}/path")
        try:
            previews.append(preview_source(spec, source))
        except MISTAKES as error:
            problems.append(Problem(f"{place}/path", message_of(error)))
    found = [preview for preview in previews if preview is not None]
    if found and not problems and (warning := absent_tokens(spec)) is not None:
        found[0] = replace(found[0], notes=(warning, *found[0].notes))
    return found, problems


def _count(spec: JobSpec, problems: list[Problem]) -> dict[str, Any] | None:
    # A run that goes on at the step of another has fewer steps left than its samples.
    if not problems and spec.training.optimizer_state is None:
        with suppress(ValueError, OSError):
            count = count_samples(spec)
            return None if count is None else asdict(count)
    return None


def _largest(spec: JobSpec) -> LargestRead | None:
    placed = ((pointer, source, spec.data.columns_of(source)) for pointer, source in _pointed_sources(spec.data))
    with suppress(ValueError, OSError):
        return largest_read(islice(placed, PREVIEWED_SOURCES))
    return None


def _confine(policy: ReadPolicy, parent: Parent | None) -> None:
    """Leave users' code the storage roots of its project, and the run directories of no other project."""
    roots = [root for root in policy.roots if root not in policy.runs]
    runs = [f"{root.rstrip('/')}/{policy.project}" for root in policy.runs]
    places = [*roots, *runs, *([parent.run_dir] if parent else [])]
    confine([local_path(uri) for uri in places if is_local(uri)], remote=not all(map(is_local, places)))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the problems of a spec's data and model, the model's sizes, and counts of the first rows.

    The answer to a spec with own code is `{"then": …}` first, with what can be found without the code. With that as
    `before`, it is what the code adds: `train_loop.preflight.code_answer` checks it.
    """
    # The run of a job of any kind has the model, the data and the mesh to check.
    job, policy = parse_any(question["spec"]), ReadPolicy.model_validate(question["read_policy"])
    parent = Parent.model_validate(question["parent"]) if question["parent"] else None
    before = question.get("before")
    if before is not None:
        _confine(policy, parent)
        torch.set_num_threads(1)
    # Opened files are checked again: a link may replace a file after the first check.
    with limit_inputs(policy), storage_patience(_STORAGE_SECONDS):
        try:
            adapted = read_settings(job, policy, parent)
            if before is not None:
                return _answer_of_code(adapted, before, policy, parent)
            if adapted.spec.run.code is not None:
                return _before_code(adapted, policy)
            return _answer_without_code(adapted, policy, parent)
        except StorageUnavailable as error:
            return {"unavailable": {"root": str(error.filename), "error": str(error.strerror)}}


def _answer_without_code(adapted: AdaptedSpec, policy: ReadPolicy, parent: Parent | None) -> dict[str, Any]:
    spec = adapted.spec.run
    shape, problems = (None, [*adapted.problems]) if adapted.problems else check_model(spec, policy, parent)
    problems = [*check_data(spec, policy), *problems]
    preview, bad = ([], []) if problems else _preview(spec)
    problems += bad
    largest = None if problems else _largest(spec)
    prompts = None if problems or parent is not None else prompt_note(spec.model)
    return {
        "problems": [asdict(problem) for problem in problems],
        "shape": shape and asdict(shape),
        "preview": [asdict(source) for source in preview],
        "count": _count(spec, problems),
        "largest": largest and asdict(largest),
        "lora": adapted.lora and adapted.lora.model_dump(mode="json"),
        "notes": [*adapted.notes, *filter(None, [prompts])],
    }


def _before_code(adapted: AdaptedSpec, policy: ReadPolicy) -> dict[str, Any]:
    """Return what can be found without own code, and whether it is to be run: its package has been unpacked."""
    spec = adapted.spec.run
    code, unread = read_code(spec, policy, set_pointer)
    problems = [*check_data(spec, policy), *adapted.problems, *unread]
    found = {
        "problems": [asdict(problem) for problem in problems],
        "code": code and code.sha256,
        "lora": adapted.lora and adapted.lora.model_dump(mode="json"),
        "notes": adapted.notes,
    }
    return found | {"shape": None} if code is None else {"then": found}


def _answer_of_code(
    adapted: AdaptedSpec, before: dict[str, Any], policy: ReadPolicy, parent: Parent | None
) -> dict[str, Any]:
    """Return what own code adds to an answer: its problems, the model's sizes and the number of samples."""
    spec = adapted.spec.run
    assert spec.code is not None, "only specs with code are checked twice"
    code = spec.code.model_copy(update={"sha256": before["code"]})
    spec = spec.model_copy(update={"code": code})
    shape, problems = None, import_code(code, set_pointer)
    if not problems and not adapted.problems:
        shape, problems = check_model(spec, policy, parent)
    if not problems and not before["problems"]:
        problems = check_calls(spec, set_pointer)
        if shape is not None and not problems:
            shape = replace(shape, call=measure_call(spec))
    return {
        "problems": [asdict(problem) for problem in problems],
        "shape": shape and asdict(shape),
        "count": _count(spec, problems),
    }


def answer_request(request: dict[str, Any]) -> dict[str, Any] | bytes:
    """Return the answer to a spec, or a page of an inference job's results."""
    return answer_page(request["results"]) if "results" in request else answer(request)


if __name__ == "__main__":
    serve(answer_request)
