"""Checks of a spec's model, built on the meta device, and its sizes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from train_loop.data.masking import check_mask
from train_loop.data.prepare.sources import check_plain
from train_loop.errors import ModelError
from train_loop.model.bounds import large_model, large_numbers
from train_loop.model.build import check_rules
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.families.family import Examination, Family
from train_loop.model.float8 import float8_linears
from train_loop.model.folder import model_config, model_folder, model_shape
from train_loop.model.freeze import freeze
from train_loop.model.load import match_folder
from train_loop.model.lora.adapters import inject_adapters, lora_checks, lora_notes
from train_loop.model.quantize import frozen_linears, quantize_layers, quantized_layers
from train_loop.model.sentence.rule import rule_problems
from train_loop.model.whole import whole_parameters
from train_loop.optim.build import muon_matrices, plan_groups
from train_loop.parallel.layers import tiled_mlps
from train_loop.parallel.unit_sizes import compute_bytes, unit_sizes
from train_loop.parallel.units import check_precision, check_selective, expert_units, find_units, repeated_layers
from train_loop.plan import ModelShape, ParameterCounts, QuantizedWeights
from train_loop.preflight.adapters import stored_problems
from train_loop.preflight.call_sizes import measure_text_call
from train_loop.preflight.parent_checkpoint import check_optimizer_state, checkpoint_problems
from train_loop.preflight.planned_units import planned_units
from train_loop.preflight.process.fork_server import MISTAKES, message_of, set_pointer
from train_loop.preflight.tokenizer import tokenizer_problems
from train_loop.run_dir import Parent, ReadPolicy
from train_loop.spec import JobSpec, ModelSpec, Problem


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
        contradictions = [*rule_problems(spec)] if parent is None else []
    except MISTAKES as error:
        return shape, [Problem(pointer, message_of(error))]
    if problems := _failed((one.pointer, one.check) for one in lora_checks(anatomy, spec)):
        return shape, problems
    shape = replace(shape, notes=lora_notes(anatomy, spec.model))
    if problems := _adapter_problems(anatomy, spec, parent):
        return shape, problems
    problems = checkpoint_problems(anatomy, spec.model, parent, pointer) if parent is not None else []
    problems += contradictions
    problems += tokenizer_problems(spec, policy, shape, parent) or _mask_problems(spec, anatomy)
    problems += _setting_problems(anatomy, found, spec)
    problems += _state_problems(anatomy, spec, policy)
    # Counted last, because the check of freeze_module_prefix freezes.
    return (shape if problems else _counted(shape, anatomy, found, spec)), problems


def _adapter_problems(anatomy: Anatomy, spec: JobSpec, parent: Parent | None) -> list[Problem]:
    """Give a model its adapters, and return the problems of the folder of `model.adapter`."""
    if spec.model.lora is not None:
        set_pointer("/model/lora")
        inject_adapters(anatomy, spec.model)
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
    except MISTAKES as error:
        return [Problem("/training/optimizer_state", message_of(error))]
    return []


def _mask_problems(spec: JobSpec, anatomy: Anatomy) -> list[Problem]:
    set_pointer("/model/head")
    try:
        check_mask(spec, untrained=getattr(anatomy.embeddings, "padding_idx", None))
    except MISTAKES as error:
        return [Problem("/model/head", message_of(error))]
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
    repeated, counts = repeated_layers(anatomy, spec.strategy.wrap_policy), _count_parameters(anatomy, spec, found)
    if held := found.held():
        counts = replace(counts, of_rank=_count_parameters(anatomy, spec, found, lambda one: held[id(one)]))
    counts = replace(counts, rows=_rows(anatomy, spec))
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
        rotated=found.rotated,
        loss_depends_on_micro_batch=anatomy.experts is not None
        and anatomy.experts.loss_depends_on_micro_batch(spec.training),
        float8=float8_linears(anatomy, repeated, spec) if spec.strategy.float8 is not None else None,
    )
    is_called = found.sees_whole_rows or spec.model.label_head is not None
    # A family of unknown layers that cannot be called on meta, as XLNet.
    is_called |= kept is None and not shape.known and spec.code is None
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


def _count_parameters(
    anatomy: Anatomy, spec: JobSpec, found: Examination, size: Callable[[Tensor], int] = Tensor.numel
) -> ParameterCounts:
    """Count the parameters of a model whose frozen modules are frozen, or a part of each."""
    layers = [sum(map(size, one.parameters())) for one in repeated_layers(anatomy, spec.strategy.wrap_policy)]
    parameters, matrices = list(anatomy.model.parameters()), muon_matrices(anatomy)
    trained = [p for p in parameters if p.requires_grad]
    unused = [p for p in trained if p in found.unused]
    idle = [p for p in parameters if p in found.unused or not p.requires_grad]
    units = [one for unit in find_units(anatomy, spec.strategy.wrap_policy) for one in unit]
    in_units = {id(parameter) for unit in units for parameter in unit.parameters()}
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
        buffers=sum(one.nbytes for one in anatomy.model.buffers()),
        unused=sum(map(size, unused)),
        idle_of_root=sum(size(p) for p in idle if id(p) not in in_units),
        idle=0 if anatomy.experts is None else anatomy.experts.idle,
        experts=0 if anatomy.experts is None else anatomy.experts.largest,
        groups=tuple(plan_groups(anatomy, spec.training)),
    )


def _rows(anatomy: Anatomy, spec: JobSpec) -> tuple[tuple[int, int, int], ...]:
    """Return the values and trained values of parameters by the size of their first dimension, without whole ones."""
    sizes, trained, wholes = (
        Counter[int](),
        Counter[int](),
        whole_parameters(anatomy.model, spec.strategy.ignored_params),
    )
    for one in anatomy.model.parameters():
        if id(one) not in wholes:
            sizes[one.shape[0]] += one.numel()
            trained[one.shape[0]] += one.numel() * one.requires_grad
    return tuple((rows, size, trained[rows]) for rows, size in sizes.items())


def _quantize(anatomy: Anatomy, spec: JobSpec) -> QuantizedWeights | None:
    """Store the frozen weights of `model.quantize_base` as codes and scales, as workers do, and return their sizes."""
    if (kind := spec.model.quantize_base) is None:
        return None
    quantize_layers(anatomy, repeated_layers(anatomy, spec.strategy.wrap_policy), kind)
    layers = quantized_layers(anatomy.model).values()
    sizes = [one.in_features * one.out_features for one in layers]
    return QuantizedWeights(sum(sizes), sum(one.stored_bytes for one in layers), max(sizes))


def _setting_problems(anatomy: Anatomy, found: Examination, spec: JobSpec) -> list[Problem]:
    """Return the settings of a spec that its model does not support."""
    strategy, policy = spec.strategy, spec.strategy.wrap_policy
    by = "transformer_layer_cls_to_wrap" if policy.min_num_params is None else "min_num_params"
    checks: list[tuple[str, Callable[[], object]]] = [
        *found.settings,
        (f"/strategy/wrap_policy/{by}", lambda: find_units(anatomy, policy.model_copy(update={"moe_experts": ()}))),
        ("/strategy/wrap_policy/moe_experts", lambda: expert_units(anatomy, policy)),
        ("/strategy/precision", lambda: check_precision(anatomy, spec)),
        ("/model/gradient_checkpointing", lambda: check_selective(anatomy, spec)),
        ("/model/gradient_checkpointing", lambda: _check_offload(spec.model)),
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


def _check_offload(model: ModelSpec) -> None:
    """Raise ModelError if compile would have no effect. Stored specs may have both: earlier versions accepted them."""
    if model.compile and model.gradient_checkpointing == "offload":
        raise ModelError(
            "gradient_checkpointing=offload moves the inputs of layers by hooks that torch.compile does not "
            "translate, so that compile has no effect; choose full, or remove compile"
        )
