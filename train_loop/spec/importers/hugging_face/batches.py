"""Batches of Trainer: of each process, or shared among all processes by `accelerator_config`."""

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, pointer_of
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag, number

_SIZE, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_OLD = "per_gpu_train_batch_size"
_DEFAULT_SIZE = 8
_CONFIG = "accelerator_config"
_SPLIT = f"{_CONFIG}.split_batches"
_NUM_STEPS = f"{_CONFIG}.gradient_accumulation_kwargs.num_steps"


def read_batches(draft: Draft, *, tool: str) -> None:
    """Translate the batch and its accumulation. Raises SpecError for contradictions that Trainer refuses, too."""
    if isinstance(draft.get(_CONFIG), str):
        message = f"{_CONFIG} names a file, which may change the batch; write its fields here"
        raise SpecError([Problem(pointer_of(_CONFIG), message)])
    size, steps = _size_field(draft), _steps_field(draft)
    shared = next((field for field in (_SPLIT, "split_batches") if flag(draft.get(field, False))), None)
    if shared is not None:
        _share(draft, shared, size, steps)
        return
    draft.leave("split_batches", "off")
    draft.take(size, f"training.{_SIZE}", number)
    draft.take(steps, f"training.{_STEPS}", number)
    draft.assume(steps, f"training.{_STEPS}", 1, tool=tool)


def _size_field(draft: Draft) -> str:
    """Return the field with the sequences of a process: the older one wins."""
    if not draft.get(_OLD):
        draft.leave(_OLD, "off")
        return _SIZE
    draft.leave(_SIZE, f"{_OLD} wins")
    return _OLD


def _steps_field(draft: Draft) -> str:
    """Return the field with the micro-batches of a step. Raises SpecError if two differ from 1."""
    if not draft.has(_NUM_STEPS):
        return _STEPS
    inner, outer = number(draft.get(_NUM_STEPS)), number(draft.get(_STEPS, 1))
    if outer != 1:
        message = f"num_steps={inner!s:.20} and {_STEPS}={outer!s:.20} both set the accumulation; remove one"
        raise SpecError([Problem(pointer_of(_NUM_STEPS), message)])
    draft.leave(_STEPS, "num_steps wins")
    return _NUM_STEPS


def _share(draft: Draft, field: str, size: str, steps: str) -> None:
    """Write the batch of all processes together; micro-batches of one sequence go with any number of workers."""
    sequences, count = number(draft.get(size, _DEFAULT_SIZE)), number(draft.get(steps, 1))
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in (sequences, count)):
        message = f"split_batches shares {size}={sequences!s:.20} among all processes; write a number"
        raise SpecError([Problem(pointer_of(field), message)])
    target = "training.global_batch_size"
    draft.write(field, target, sequences * count, reason="the batch is that of all processes together")
    reason = "a part of the batch; at most global_batch_size / workers, which is fastest"
    draft.write(size, f"training.{_SIZE}", 1, reason=reason)
    if draft.has(steps):
        draft.note(steps, Outcome.TRANSLATED, target=target, written=sequences * count)
