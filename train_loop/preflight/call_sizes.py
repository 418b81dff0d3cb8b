"""Bytes of activations and FLOPs of a call of a model, counted on tensors without values."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train_loop.code.use import own_code
from train_loop.data.columns import token_columns
from train_loop.data.dataset import Dataset
from train_loop.loop.batch import MicroBatch
from train_loop.loop.build import build_objective
from train_loop.loop.fake_call import FakeCall, count_flops_of_rows, fake_call
from train_loop.loop.objectives.own_loss import call_batch, call_loss
from train_loop.model.families.choose import family_of
from train_loop.model.families.family import Examination
from train_loop.parallel.build import ShardedModel
from train_loop.plan import CallSizes, ModelShape, plan_sizes
from train_loop.preflight.fork_server import lacks_memory
from train_loop.preflight.own_calls import first_batch
from train_loop.preflight.own_code import first_rows_of
from train_loop.spec import JobSpec
from train_loop.telemetry.timers import ComputeTimer

CPU = torch.device("cpu")


def measure_call(spec: JobSpec) -> CallSizes:
    """Return the bytes and FLOPs of own code with a micro-batch of a spec's first rows, or why they are unknown."""
    assert spec.code is not None, "only specs with code have own rows"
    code = own_code(spec.code)

    def measure() -> CallSizes:
        columns = first_batch(first_rows_of(spec), spec)
        flops, batch = count_flops_of_rows(spec, columns), call_batch(code, columns, CPU)
        with fake_call(family_of(spec).build(spec.model), spec, batch, recompute=True) as call, LiveBytes(call) as live:
            torch.autograd.backward(call_loss(code, call.model, call.batch).total)
        activations, gradients = live.peak()
        return CallSizes(spec.training.micro_batch, activations, gradients, flops)

    return _or_problem(measure, spec)


def measure_text_call(spec: JobSpec, shape: ModelShape, found: Examination) -> CallSizes:
    """Return the bytes of a model of transformers with a micro-batch of whole rows, or why they are unknown."""

    def measure() -> CallSizes:
        plans = plan_sizes(spec, shape)
        job, plan = spec.at(max(plans)), plans[max(plans)]
        anatomy = family_of(job).build(job.model)
        family, model = anatomy.family, anatomy.model.train()
        family.choose_attention(model, job, CPU)
        found.prepare(model)
        on_gpu = bool(job.scaling.resources_per_worker.get("GPU"))
        dataset = Dataset(fingerprint="", parts=(), sequence_length=job.data.sequence_length)
        with fake_call(anatomy, job, _text_batch(job), recompute=True) as call, LiveBytes(call) as live, _Answers():  # type: ignore[no-untyped-call]
            objective = build_objective(
                ShardedModel(anatomy, ComputeTimer(CPU), found.after_head, []), job, plan, dataset
            )
            arguments = family.arguments(model, call.batch)
            with family.fused_attention(model) if on_gpu else nullcontext():
                torch.autograd.backward(objective(MicroBatch(call.batch, arguments, last=True)).total)
        return CallSizes(job.training.micro_batch, *live.peak())

    return _or_problem(measure, spec)


def _or_problem(measure: Callable[[], CallSizes], spec: JobSpec) -> CallSizes:
    try:
        return measure()
    except Exception as error:  # errors of models have no common class, in backward either
        if lacks_memory(error):
            raise
        problem = " ".join(str(error).split()).removesuffix("; correct the code")[:300]
        return CallSizes(spec.training.micro_batch, problem=problem)


def _text_batch(spec: JobSpec) -> dict[str, Tensor]:
    """Return the columns of a micro-batch of text, whose rows have no padding."""
    rows, length, values = spec.training.micro_batch, spec.data.sequence_length, dict[str, Tensor]()
    for column in token_columns(labelled=True, sequences=spec.data.sequences):
        value = torch.from_numpy(column.padding(rows, length))
        value = value if column.sequences == 1 else value.flatten(0, 1)
        values[column.name] = value.long() if column.kind == "token" else value
    return values


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for models that ask for values: whether a row has something rare, or activations have a fault.

    Unknown values are 0, and equal to any value in a comparison.
    """

    _compares = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            return self._compares if args[0].dtype is torch.bool else 0
        finally:
            self._compares = func is torch.ops.aten.eq.Scalar


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes of living tensors of a call, with its batch and the buffers of the model.

    Parameters do not count. Gradients of FSDP's root unit live until the end of backward, and count apart; those of
    other units are reduced before, and do not count.
    """

    def __init__(self, call: FakeCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = weakref.WeakKeyDictionary[Any, int]()
        """Number of each living storage."""
        self._changes = list[tuple[int, int]]()
        """Numbers of storages with the bytes that begin or end, by time."""
        self._gradients, self._root = set[int](), set[int]()
        given = [one for one in (*call.model.buffers(), *tree_leaves(call.batch)) if isinstance(one, Tensor)]
        self._given = sum(one.nbytes for one in given)
        self._in_units = {id(parameter) for unit in call.units for parameter in unit.parameters()}
        for one in (*call.model.parameters(), *given):
            self._numbers[one.untyped_storage()] = -1
        for parameter in call.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._sort)  # type: ignore[no-untyped-call]

    def peak(self) -> tuple[int, int]:
        """Return the bytes of activations and of the root's gradients when both together are largest."""
        activations, gradients = self._given, 0
        found = activations, 0
        for number, size in self._changes:
            if number in self._root:
                gradients += size
            elif number not in self._gradients:
                activations += size
            found = max(found, (activations, gradients), key=sum)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage not in self._numbers:
            number, size = len(self._changes), storage.nbytes()
            self._numbers[storage] = number
            self._changes.append((number, size))
            weakref.finalize(storage, self._changes.append, (number, -size))

    def _sort(self, parameter: Tensor) -> None:
        """Note whose gradient has been computed, and free those that FSDP reduces."""
        assert parameter.grad is not None
        in_unit = id(parameter) in self._in_units
        (self._gradients if in_unit else self._root).add(self._numbers.get(parameter.grad.untyped_storage(), -1))
        if in_unit:
            parameter.grad = None
