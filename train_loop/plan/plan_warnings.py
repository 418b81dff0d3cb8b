"""Warnings of a plan about an accepted spec. Pure."""

from train_loop.plan.model.shape import ModelShape
from train_loop.spec import JobSpec

_MOST_OF_SGD, _MOST_OF_OTHERS = 10.0, 0.1
"""Learning rates above which a plan warns. Steps of the other optimizers do not depend on the size of gradients."""


def plan_warnings(spec: JobSpec, shape: ModelShape) -> tuple[str, ...]:
    """Return what a user should know of a spec that is accepted: estimates, and settings that are rarely meant."""
    of_numbers = *_of_micro_batches(shape), *_of_positions(spec, shape), *_of_rates(spec)
    return *shape.notes, *_of_memory(spec, shape), *_of_float8(spec), *of_numbers


def _of_positions(spec: JobSpec, shape: ModelShape) -> tuple[str, ...]:
    if shape.rotated is None or spec.positions <= shape.rotated:
        return ()
    return (
        f"sequences of up to {spec.positions} tokens are longer than the {shape.rotated} positions of the model's "
        "config (max_position_embeddings), for which its rotations of queries and keys are made; choose a smaller "
        "data.sequence_length, or scale them in the config (rope_parameters)",
    )


def _of_rates(spec: JobSpec) -> tuple[str, ...]:
    if spec.infer is not None:
        return ()
    training = spec.training
    own = {f"groups.{n}.learning_rate": group.learning_rate for n, group in enumerate(training.groups)}
    rates = {"learning_rate": training.learning_rate, **own}
    most = _MOST_OF_SGD if training.optimizer == "sgd" else _MOST_OF_OTHERS
    return tuple(
        f"training.{name}={rate:g} is unusually large for optimizer={training.optimizer}, whose rates are rarely above "
        f"{most:g}: training may diverge; check it"
        for name, rate in rates.items()
        if rate is not None and rate > most
    )


def _of_micro_batches(shape: ModelShape) -> tuple[str, ...]:
    if not shape.loss_depends_on_micro_batch:
        return ()
    return (
        "the loss of routers is a mean over a micro-batch of all workers (router_aux_loss.scope=micro): another number "
        "of workers, or another size of micro-batches, trains another loss; set router_aux_loss.scope: sequence to "
        "avoid it",
    )


def _of_float8(spec: JobSpec) -> tuple[str, ...]:
    chosen = spec.strategy.float8
    if chosen is None or spec.scaling.resources_per_worker.get("GPU"):
        return ()
    return (
        f"float8={chosen} is emulated on CPUs: operands are rounded to float8 and multiplied in fp32, which takes more "
        "time than without float8",
    )


def _of_memory(spec: JobSpec, shape: ModelShape) -> tuple[str, ...]:
    if shape.known:
        return ()
    if spec.code is not None:
        return _warnings_of_code(shape)
    counted = shape.active is not None or not spec.model.compile
    if (counted and shape.kept is not None) or (shape.active is not None and shape.is_measured):
        # Counted in a call of the model, as the formula says.
        return ()
    if shape.is_measured:
        return (f"model_type={shape.model_type}: activations are estimated from a call without values",)
    what = "memory is" if shape.counts is None else "activations are"
    return (f"model_type={shape.model_type}: {what} estimated as for a dense decoder with a gated MLP",)


def _warnings_of_code(shape: ModelShape) -> tuple[str, ...]:
    call = shape.call
    if call is None or call.problem is not None:
        why = "" if call is None else f", because it cannot be called without values ({call.problem})"
        return (f"own code: its activations are not part of the memory estimate{why}",)
    return ("own code: activations are estimated from a call of its first rows without values",)
