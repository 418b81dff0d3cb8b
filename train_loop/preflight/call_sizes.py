"""Bytes of activations and FLOPs of a call of a model, counted on tensors without values."""

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
from train_loop.model.families.live_bytes import LiveBytes
from train_loop.parallel.build import ShardedModel
from train_loop.plan import CallSizes, ModelShape, plan_sizes
from train_loop.preflight.own_calls import first_batch
from train_loop.preflight.own_code import first_rows_of
from train_loop.preflight.process.fork_server import lacks_memory
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
        with fake_call(family_of(spec).build(spec.model), spec, batch, recompute=True) as call, _live(call) as live:
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
        with fake_call(anatomy, job, _text_batch(job), recompute=True) as call, _live(call) as live, _Answers():  # type: ignore[no-untyped-call]
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


def _live(call: FakeCall) -> LiveBytes:
    given = (*call.model.buffers(), *tree_leaves(call.batch))
    return LiveBytes(call.model, call.units, (one for one in given if isinstance(one, Tensor)))


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
