"""Preflight checks of a spec's data and model before submission; a helper process of the service.

`python -m train_loop.preflight.checks SOCKET` listens on SOCKET until its standard input closes. A request is
{"spec": …, "read_policy": {…}, "parent": … or null, "seconds": …}, the answer {"problems": [{"pointer", "message"}],
"shape": {…}, "preview": […], "count": {…}, "largest": {…}, "lora": {…}, "notes": […]}. `shape` has the model's sizes,
or is null if they are unknown; `lora` has the settings of the adapters that the spec names. If storage is unavailable,
the answer is {"unavailable": {"root", "error"}}. A request {"results": …, "seconds": …} reads a page of results. A
separate process spares the service torch's memory and import time. It forks for each request, because a damaged file
may crash the library that opens it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from train_loop.data.files import is_local, storage_patience
from train_loop.data.masking import check_mask
from train_loop.data.own_columns import own_columns
from train_loop.data.prepare.largest_read import largest_read
from train_loop.data.prepare.rows import check_columns, is_empty
from train_loop.data.prepare.sources import check_allowed, check_plain, list_files
from train_loop.data.read_results import answer_page
from train_loop.data.text.chat import check_chat_template
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError, ModelError
from train_loop.model.bounds import large_model, large_numbers
from train_loop.model.build import check_rules
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.families.family import Examination, Family
from train_loop.model.float8 import float8_linears
from train_loop.model.folder import model_config, model_folder, model_shape, tokenizer_folder
from train_loop.model.freeze import freeze
from train_loop.model.load import match_folder
from train_loop.model.lora.adapters import inject_adapters, lora_checks
from train_loop.model.quantize import frozen_linears, quantize_layers, quantized_layers
from train_loop.model.whole import whole_parameters
from train_loop.optim.build import muon_matrices, plan_groups
from train_loop.parallel.layers import tiled_mlps
from train_loop.parallel.unit_sizes import compute_bytes, unit_sizes
from train_loop.parallel.units import check_precision, check_selective, expert_units, find_units, repeated_layers
from train_loop.plan import LargestRead, ModelShape, ParameterCounts, Preview, QuantizedWeights, SampleCount
from train_loop.preflight.absent_tokens import absent_tokens, check_written_tokens
from train_loop.preflight.adapters import read_settings, stored_problems
from train_loop.preflight.call_sizes import measure_call, measure_text_call
from train_loop.preflight.fork_server import lacks_memory, serve, set_pointer
from train_loop.preflight.own_code import check_calls, import_code
from train_loop.preflight.parent_checkpoint import (
    check_optimizer_state,
    checkpoint_problems,
    has_its_tokenizer,
)
from train_loop.preflight.planned_units import planned_units
from train_loop.preflight.preview import PREVIEWED_SOURCES, preview_source
from train_loop.preflight.sample_count import count_samples
from train_loop.preflight.sandbox import confine
from train_loop.run_dir import Parent, ReadPolicy, StorageUnavailable, local_path
from train_loop.spec import ColumnsSpec, DataSpec, JobSpec, ModelSpec, Problem, SourceSpec, parse_any
from train_loop.system.input_files import limit_inputs

# pathlib raises RuntimeError for symlink loops; parsers of nested text raise its subclass RecursionError.
_MISTAKES = (ValueError, OSError, RuntimeError)
_STORAGE_SECONDS = 5.0
"""Seconds to retry failed storage, while a user waits."""


def _message(error: Exception) -> str:
    """Return the message of a user's error. Raise other errors, such as unavailable storage, unchanged."""
    if isinstance(error, StorageUnavailable):
        raise error
    if isinstance(error, RecursionError):
        return "it is nested too deeply to be read; copy it again, or write it with fewer levels"
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):
        return f"its symbolic links form a loop ({error}); correct or remove them"
    if lacks_memory(error) or isinstance(error, RuntimeError):
        raise error
    return str(error)


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


def check_model(
    spec: JobSpec, policy: ReadPolicy, parent: Parent | None = None
) -> tuple[ModelShape | None, list[Problem]]:
    """Return the sizes of a spec's model, None if unknown, and the problems of model and tokenizer.

    The model is built on the meta device, which needs no memory, and compared with the file headers of its folder, or
    with the checkpoint of the parent run.
    """
    shape, pointer = None, "/model/config" if spec.model.path is None else "/model/path"
    pointer = pointer if spec.code is None else "/code/model"
    set_pointer(pointer)
    try:
        family = family_of(spec)
        if spec.model.path is not None:
            check_plain(spec.model.path, policy)
        if problems := large_numbers(model_config(spec.model), pointer):
            return None, problems
        shape = _shape(spec.model, family)
        if problems := large_model(shape, pointer):
            return None, problems
        anatomy, folder = family.build(spec.model), model_folder(spec.model)
        anatomy.check_rows(shape.vocab)
        homes = match_folder(anatomy, folder).homes if folder is not None else {}
        check_rules(anatomy, [name for name, stored in homes.items() if stored])
        found = family.examine(anatomy, spec)
    except _MISTAKES as error:
        return shape, [Problem(pointer, _message(error))]
    if problems := _adapter_problems(anatomy, spec, parent):
        return shape, problems
    problems = checkpoint_problems(anatomy, spec.model, parent, pointer) if parent is not None else []
    problems += _tokenizer_problems(spec, policy, shape, parent) or _mask_problems(spec, anatomy)
    problems += _wishes_not_granted(anatomy, found, spec)
    problems += _state_problems(anatomy, spec, policy)
    # Counted last, because the check of freeze_module_prefix freezes.
    return (shape if problems else _counted(shape, anatomy, found, spec)), problems


def _adapter_problems(anatomy: Anatomy, spec: JobSpec, parent: Parent | None) -> list[Problem]:
    """Return the problems of `model.lora` and `model.adapter`; without any, the model gets its adapters."""
    if problems := _failed((one.pointer, one.check) for one in lora_checks(anatomy, spec)):
        return problems
    if spec.model.lora is not None:
        set_pointer("/model/lora")
        inject_adapters(anatomy, spec.model.lora)
    return stored_problems(anatomy.model, spec.model) if parent is None else []


def _failed(checks: Iterable[tuple[str, Callable[[], object]]]) -> list[Problem]:
    """Return the problems of settings, by pointer, whose checks fail."""
    problems = []
    for pointer, check in checks:
        try:
            check()
        except ModelError as error:
            problems.append(Problem(pointer, str(error)))
    return problems


def _state_problems(anatomy: Anatomy, spec: JobSpec, policy: ReadPolicy) -> list[Problem]:
    try:
        check_optimizer_state(anatomy.model, spec.training, policy)
    except _MISTAKES as error:
        return [Problem("/training/optimizer_state", _message(error))]
    return []


def _shape(model: ModelSpec, family: Family) -> ModelShape:
    """Return the sizes in a config. Raises ModelError; if its kind is not supported, this is the reason."""
    try:
        return model_shape(model)
    except ModelError:
        family.build(model)
        raise


def _counted(shape: ModelShape, anatomy: Anatomy, found: Examination, spec: JobSpec) -> ModelShape:
    """Return a shape with the numbers of parameters, and of layers if no config states it."""
    repeated, counts = repeated_layers(anatomy, spec.strategy.wrap_policy), _count_parameters(anatomy, spec)
    if held := found.held():
        counts = replace(counts, of_rank=_count_parameters(anatomy, spec, lambda one: held[id(one)]))
    layers = shape.layers if spec.code is None else len(repeated)
    tiled = tiled_mlps(anatomy, repeated) if spec.strategy.apply_tiled_mlp else []
    kept = None if shape.known and shape.labels is None else found.kept(repeated, tiled)
    whole = replace(
        shape,
        layers=layers,
        counts=counts,
        whole_scores=found.whole_scores,
        kept=kept,
        tiles=_can_tile(anatomy, repeated, spec),
        float8=float8_linears(anatomy, repeated, spec) if spec.strategy.float8 is not None else None,
    )
    is_called = found.sees_whole_rows or spec.model.label_head is not None
    call = measure_text_call(spec, whole, found) if is_called else None
    # The last of all, because codes and FSDP2 change the model.
    quantized = _quantize(anatomy, spec)
    counts = replace(counts, units=unit_sizes(anatomy, spec.strategy))
    return replace(whole, call=call, counts=counts, quantized=quantized, built=planned_units(anatomy, spec))


def _can_tile(anatomy: Anatomy, layers: Sequence[nn.Module], spec: JobSpec) -> bool:
    """Return whether the MLPs of a model can compute in tiles."""
    try:
        return spec.code is None and bool(tiled_mlps(anatomy, layers))
    except ModelError:
        return False


def _count_parameters(anatomy: Anatomy, spec: JobSpec, size: Callable[[Tensor], int] = Tensor.numel) -> ParameterCounts:
    """Count the parameters of a model whose frozen modules are frozen, or a part of each."""
    layers = [sum(map(size, one.parameters())) for one in repeated_layers(anatomy, spec.strategy.wrap_policy)]
    parameters, matrices = list(anatomy.model.parameters()), muon_matrices(anatomy)
    trained = [p for p in parameters if p.requires_grad]
    wholes = whole_parameters(anatomy.model, spec.strategy.ignored_params)
    total = sum(map(size, parameters))
    return ParameterCounts(
        total=total,
        trained=sum(map(size, trained)),
        trained_matrices=sum(size(p) for p in trained if id(p) in matrices),
        layer=max(layers, default=0),
        outside=max(total - sum(layers), 0),
        module=max(sum(map(size, module.parameters(recurse=False))) for module in anatomy.model.modules()),
        compute=compute_bytes(anatomy, spec.strategy),
        wholes=sum(size(p) for p in parameters if id(p) in wholes),
        trained_wholes=sum(size(p) for p in trained if id(p) in wholes),
        idle=0 if anatomy.experts is None else anatomy.experts.idle,
        experts=0 if anatomy.experts is None else anatomy.experts.largest,
        groups=tuple(plan_groups(anatomy, spec.training)),
    )


def _quantize(anatomy: Anatomy, spec: JobSpec) -> QuantizedWeights | None:
    """Store the frozen weights of `model.quantize_base` as codes and scales, as workers do, and return their sizes."""
    if (kind := spec.model.quantize_base) is None:
        return None
    quantize_layers(anatomy, repeated_layers(anatomy, spec.strategy.wrap_policy), kind)
    layers = quantized_layers(anatomy.model).values()
    sizes = [one.in_features * one.out_features for one in layers]
    return QuantizedWeights(sum(sizes), sum(one.stored_bytes for one in layers), max(sizes))


def _wishes_not_granted(anatomy: Anatomy, found: Examination, spec: JobSpec) -> list[Problem]:
    """Return the settings of a spec that its model does not support."""
    strategy, policy = spec.strategy, spec.strategy.wrap_policy
    by = "transformer_layer_cls_to_wrap" if policy.min_num_params is None else "min_num_params"
    checks: list[tuple[str, Callable[[], object]]] = [
        *found.settings,
        (f"/strategy/wrap_policy/{by}", lambda: find_units(anatomy, policy.model_copy(update={"moe_experts": ()}))),
        ("/strategy/wrap_policy/moe_experts", lambda: expert_units(anatomy, policy)),
        ("/strategy/precision", lambda: check_precision(anatomy, spec)),
        ("/model/gradient_checkpointing", lambda: check_selective(anatomy, spec)),
        ("/strategy/ignored_params", lambda: whole_parameters(anatomy.model, strategy.ignored_params)),
        ("/model/freeze_module_prefix", lambda: freeze(anatomy.model, spec.model.freeze_module_prefix)),
        # After frozen parameters are known.
        (
            "/training/layer_decay" if spec.training.layer_decay and not anatomy.layers else "/training/groups",
            lambda: plan_groups(anatomy, spec.training),
        ),
    ]
    if (kind := spec.model.quantize_base) is not None:
        layers = repeated_layers(anatomy, policy)
        checks.append(("/model/quantize_base", lambda: frozen_linears(anatomy, layers, kind)))
    if strategy.float8 is not None:
        checks.append(("/strategy/float8", lambda: float8_linears(anatomy, repeated_layers(anatomy, policy), spec)))
    if strategy.apply_tiled_mlp:
        checks.append(("/strategy/apply_tiled_mlp", lambda: tiled_mlps(anatomy, repeated_layers(anatomy, policy))))
    return _failed(checks)


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
    except _MISTAKES as error:
        return [Problem(pointers[0], _message(error))]
    try:
        if columns.own:
            own_columns(files, columns.own)
        else:
            check_columns(files, columns, skip=skip)
    except DataError as error:
        return [Problem(pointers[1], str(error))]
    return []


def _tokenizer_problems(spec: JobSpec, policy: ReadPolicy, shape: ModelShape, parent: Parent | None) -> list[Problem]:
    if not spec.data.reads_text and spec.model.tokenizer is None:
        return []
    set_pointer("/model/tokenizer")
    try:
        if spec.model.tokenizer is not None and not has_its_tokenizer(spec.model, parent, policy):
            check_plain(spec.model.tokenizer, policy)
        folder, data = tokenizer_folder(spec), spec.data
        if folder is None and data.add_bos is True:
            return [
                Problem(
                    "/data/add_bos", "a tokenizer that is trained on the data has no BOS; name one in model.tokenizer"
                )
            ]
        if folder is not None:
            tokenizer = load_tokenizer(str(folder), needs_eos=spec.model.ends_text)
            tokenizer.check_fits(shape.vocab)
            if any(data.columns_of(source).messages for source in (*data.sources, *data.eval_sources)):
                problems = _template_problems(data, policy, str(folder))
                if problems:
                    return problems
            check_written_tokens(tokenizer, data, folder, shape.vocab)
            return _bos_problems(tokenizer, data)
    except _MISTAKES as error:
        return [Problem("/model/tokenizer", _message(error))]
    return []


def _mask_problems(spec: JobSpec, anatomy: Anatomy) -> list[Problem]:
    set_pointer("/model/head")
    try:
        check_mask(spec, untrained=getattr(anatomy.embeddings, "padding_idx", None))
    except _MISTAKES as error:
        return [Problem("/model/head", _message(error))]
    return []


def _bos_problems(tokenizer: TextTokenizer, data: DataSpec) -> list[Problem]:
    try:
        tokenizer.adding_bos(data.add_bos)
    except DataError as error:
        return [Problem("/data/add_bos", str(error))]
    return []


def _template_problems(data: DataSpec, policy: ReadPolicy, folder: str) -> list[Problem]:
    """Return the problems of the chat template, at the field that names it."""
    pointer = "/model/tokenizer" if data.chat_template is None else "/data/chat_template"
    set_pointer(pointer)
    try:
        if data.template_file is not None:
            check_plain(data.template_file, policy, kind="file")
        check_chat_template(folder, data.chat_template)
    except _MISTAKES as error:
        return [Problem(pointer, _message(error))]
    set_pointer("/model/tokenizer")
    return []


def _preview(spec: JobSpec) -> tuple[list[Preview], list[Problem]]:
    """Return the effects of preparation on the first rows, and the rows that would end the job."""
    previews, problems = [], []
    for place, source in islice(_pointed_sources(spec.data), PREVIEWED_SOURCES):
        set_pointer(f"{place}/path")
        try:
            previews.append(preview_source(spec, source))
        except _MISTAKES as error:
            problems.append(Problem(f"{place}/path", _message(error)))
    found = [preview for preview in previews if preview is not None]
    if found and not problems and (warning := absent_tokens(spec)) is not None:
        found[0] = replace(found[0], notes=(warning, *found[0].notes))
    return found, problems


def _count(spec: JobSpec) -> SampleCount | None:
    with suppress(ValueError, OSError):
        return count_samples(spec)
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
    """Return the problems of a spec's data and model, the model's sizes, and counts of the first rows."""
    # The run of a job of any kind has the model, the data and the mesh to check.
    job, policy = parse_any(question["spec"]), ReadPolicy.model_validate(question["read_policy"])
    spec = job.run
    parent = Parent.model_validate(question["parent"]) if question["parent"] else None
    if spec.code is not None:
        _confine(policy, parent)
        torch.set_num_threads(1)
    # Opened files are checked again: a link may replace a file after the first check.
    with limit_inputs(policy), storage_patience(_STORAGE_SECONDS):
        try:
            adapted = read_settings(job, policy, parent)
            spec, imported = import_code(adapted.spec.run, policy, set_pointer)
            unread = [*adapted.problems, *imported]
            shape, problems = (None, unread) if unread else check_model(spec, policy, parent)
            problems = [*check_data(spec, policy), *problems]
            own = spec.code is not None
            preview, bad = ([], []) if problems or own else _preview(spec)
            problems += check_calls(spec, set_pointer) if own and not problems else []
            if own and shape is not None and not problems:
                shape = replace(shape, call=measure_call(spec))
        except StorageUnavailable as error:
            return {"unavailable": {"root": str(error.filename), "error": str(error.strerror)}}
        problems += bad
        # A run that goes on at the step of another has fewer steps left than its samples.
        count = None if problems or spec.training.optimizer_state is not None else _count(spec)
        # Own columns are not prepared.
        largest = None if problems or own else _largest(spec)
    return {
        "problems": [asdict(problem) for problem in problems],
        "shape": shape and asdict(shape),
        "preview": [asdict(source) for source in preview],
        "count": count and asdict(count),
        "largest": largest and asdict(largest),
        "code": spec.code and spec.code.sha256,
        "lora": adapted.lora and adapted.lora.model_dump(mode="json"),
        "notes": adapted.notes,
    }


def answer_request(request: dict[str, Any]) -> dict[str, Any] | bytes:
    """Return the answer to a spec, or a page of an inference job's results."""
    return answer_page(request["results"]) if "results" in request else answer(request)


if __name__ == "__main__":
    serve(sys.argv[1], answer_request)
