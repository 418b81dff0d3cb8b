"""torchtune's recipes for full and LoRA fine-tuning → a spec."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.defaults import write_defaults
from train_loop.spec.importers.draft import Draft, has, pointer_of
from train_loop.spec.importers.folders import read_folder
from train_loop.spec.importers.parts import drop_unused
from train_loop.spec.importers.recognise import Source, Tool
from train_loop.spec.importers.references import resolve
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.torchtune.data import read_data
from train_loop.spec.importers.torchtune.defaults import DEFAULTS
from train_loop.spec.importers.torchtune.fields import OPTIMIZERS, RULES
from train_loop.spec.importers.torchtune.model import read_model
from train_loop.spec.importers.values import dtype, flag, number

NAME = "torchtune"
_NEEDED = ("model", "checkpointer", "dataset", "optimizer", "batch_size", "epochs", "dtype")
_OTHER_RECIPES = {
    "teacher_model": "knowledge distillation",
    "policy_model": "reinforcement learning",
    "ref_checkpointer": "training on preferences",
    "ref_policy_checkpointer": "reinforcement learning",
    "reward_and_value_model": "reinforcement learning",
    "reward_functions": "reinforcement learning",
    "quantizer._component_": "quantisation-aware training",
    "datasets": "several data loaders, a recipe under development",
}
_OTHER_COMPONENTS = {
    "torchtune.rlhf": "training on preferences",
    "torchtune.dev": "a recipe under development",
    "vision": "images",
    "multimodal": "images",
    "preference": "training on preferences",
    "stack_exchange_paired": "training on preferences",
    "hh_rlhf": "training on preferences",
    "_reward_": "reward models",
    "_classifier": "classifiers",
}
_REMEDY = "import a recipe of full_finetune or lora_finetune, or write a spec, starting from trainshed init"


def read_torchtune(source: Source) -> Draft:
    """Return the draft of a job from the configuration of a recipe. Raises SpecError."""
    data = resolve(dict(source.data))
    _check_recipe(data)
    draft = Draft(data)
    read_folder(draft, "checkpointer.checkpoint_dir", "model.path", reason=_format_of(draft))
    trains_adapters = read_model(draft)
    _precision(draft, trains_adapters=trains_adapters)
    _optimizer(draft, decays_norms=not trains_adapters)
    _schedule(draft)
    _length(draft)
    read_data(draft)
    _recomputation(draft)
    draft.apply(RULES)
    write_defaults(draft, DEFAULTS, NAME)
    drop_unused(draft)
    draft.need("scaling.num_workers", 1, "the file does not say how many processes tune run starts")
    draft.differ("a seed gives another order of samples, other random weights and other dropout")
    draft.differ("torchtune leaves out the last, shorter step of each epoch; here epochs follow one another")
    draft.finish(NAME)
    return draft


def _components(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and name of each component; lists are datasets."""
    for name, value in data.items():
        if name == "_component_":
            yield f"{before}{name}", str(value)
        elif isinstance(value, Mapping):
            yield from _components(value, f"{before}{name}.")
        elif isinstance(value, list):
            for one in value:
                yield from (
                    (f"{before}{name}", found) for _, found in _components(one if isinstance(one, dict) else {})
                )


def _check_recipe(data: Mapping[str, Any]) -> None:
    """Raise SpecError for recipes that train in another way, or do not train, and for fields that torchtune needs."""
    draft = Draft(data)
    found = [(field, what) for field, what in _OTHER_RECIPES.items() if draft.has(field)]
    found += [
        (field, f"{name} ({what})")
        for field, name in _components(data)
        for part, what in _OTHER_COMPONENTS.items()
        if part in name
    ]
    if found:
        field, what = found[0]
        raise SpecError([Problem(pointer_of(field), f"the recipe is {what}, which is not supported; {_REMEDY}")])
    if not draft.has("optimizer"):
        raise SpecError([Problem("", f"the recipe trains nothing: it has no optimizer; {_REMEDY}")])
    missing = [name for name in _NEEDED if not draft.has(name)]
    if missing:
        raise SpecError([Problem("", f"torchtune needs {', '.join(missing)}, and the file has none; add it")])


def _format_of(draft: Draft) -> str:
    """Return what to do with a folder of weights that transformers did not write."""
    if str(draft.get("checkpointer._component_", "")).endswith("MetaCheckpointer"):
        return "weights in Meta's format: give the Hugging Face folder of the model, with config.json"
    return ""


def _precision(draft: Draft, *, trains_adapters: bool) -> None:
    """Translate dtype, which is that of weights, gradients and optimizer states in torchtune."""
    chosen = dtype(draft.get("dtype"))
    if chosen == "fp16":
        message = "torchtune does not train in fp16; write bf16 or fp32"
        raise SpecError([Problem("/dtype", message)])
    if chosen != "bf16":
        return
    draft.differ(
        "torchtune keeps weights and optimizer states in dtype; fp32 is more exact, and takes twice the memory",
        target="model.master_dtype",
        written="bf16",
    )
    draft.differ("torchtune reduces gradients in dtype; fp32 is more exact", target="strategy.reduce_dtype",
                 written="bf16")  # fmt: skip
    if trains_adapters:
        draft.differ("torchtune also keeps adapters in dtype; here they are fp32 between steps")


def _optimizer(draft: Draft, *, decays_norms: bool) -> None:
    """Translate the optimizer, with the defaults of its class. Raises SpecError for classes without a counterpart."""
    field = "optimizer._component_"
    name = str(draft.get(field, "")).rpartition(".")[2]
    if name not in OPTIMIZERS:
        message = f"the optimizer {name:.60} does not exist here; choose torch.optim.AdamW, Adam or SGD"
        raise SpecError([Problem(pointer_of(field), message)])
    chosen, decay = OPTIMIZERS[name]
    draft.write(field, "training.optimizer", chosen)
    for place, beta in enumerate(("adam_beta1", "adam_beta2")):
        _beta(draft, place, f"training.{beta}")
    draft.assume("optimizer.lr", "training.learning_rate", 1e-3, tool=name)
    draft.assume("optimizer.weight_decay", "training.weight_decay", decay, tool=name)
    if chosen == "sgd":
        draft.assume("optimizer.momentum", "training.momentum", 0.0, tool=name)
    if decays_norms and number(draft.get("optimizer.weight_decay", decay)):
        draft.differ("torchtune decays all weights; here norms and biases are left out")


def _beta(draft: Draft, place: int, target: str) -> None:
    betas = draft.get("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        draft.write("optimizer.betas", target, number(betas[place]))


def _schedule(draft: Draft) -> None:
    """Translate the schedule. Raises SpecError for one of another name."""
    field = "lr_scheduler._component_"
    if not draft.has(field):
        return
    name = str(draft.get(field)).rpartition(".")[2]
    if name != "get_cosine_schedule_with_warmup":
        message = f"the schedule {name:.60} does not exist here; choose get_cosine_schedule_with_warmup, or none"
        raise SpecError([Problem(pointer_of(field), message)])
    draft.write(field, "training.lr_scheduler_type", "cosine")
    draft.take("lr_scheduler.num_warmup_steps", "training.warmup_steps", number)
    if draft.has("lr_scheduler.num_cycles"):
        draft.take("lr_scheduler.num_cycles", "training.lr_scheduler_kwargs.num_cycles", number)


def _length(draft: Draft) -> None:
    """Translate epochs, the steps of an epoch, and the checkpoints after each."""
    epochs, most = number(draft.get("epochs")), number(draft.get("max_steps_per_epoch"))
    draft.write("epochs", "training.num_train_epochs", epochs)
    if isinstance(most, int) and isinstance(epochs, int):
        reason = "of all epochs together"
        if epochs > 1:
            reason += (
                "; torchtune then begins the next epoch, and here the run continues with rows that it has not seen"
            )
        draft.write("max_steps_per_epoch", "training.max_steps", most * epochs, reason=reason, numbers=epochs > 1)
    if draft.has("save_every_n_steps"):
        draft.take("save_every_n_steps", "checkpoint.every_steps", number)
    elif epochs == 1:
        draft.assume("save_every_n_steps", "checkpoint.every_steps", None, tool=f"{NAME}, which saves after the epoch")
    else:
        reason = "torchtune saves after each epoch: write its steps, which trainshed plan prints"
        draft.need("checkpoint.every_steps", most if isinstance(most, int) else 500, reason, field="epochs")
    if not draft.has("checkpointer.keep_last_n_checkpoints"):
        draft.note("checkpointer.keep_last_n_checkpoints", Outcome.NOT_SUPPORTED, target="checkpoint.keep_last",
                   written=2, reason="torchtune keeps all checkpoints; here the last 2 are kept")  # fmt: skip
    limit: JsonValue = number(draft.get("clip_grad_norm"))
    if limit is not None:
        draft.write("clip_grad_norm", "training.max_grad_norm", None if str(limit) == "inf" else limit)


def _recomputation(draft: Draft) -> None:
    """Translate recomputation, which changes no numbers."""
    target = "model.gradient_checkpointing"
    offload, mode, option = "enable_activation_offloading", draft.get("ac_mode"), draft.get("ac_option")
    if flag(draft.get(offload, False)):
        draft.write(offload, target, "offload", reason="inputs of layers alone are kept in host memory")
    elif mode == "full":
        draft.write("ac_mode", target, "full")
    elif mode == "selective":
        every = number(option)
        written: JsonValue = {"every": every} if isinstance(every, int) else "selective"
        draft.write("ac_mode", target, written)
        if draft.has("ac_option"):
            draft.write("ac_option", target, written)
    if has(draft.given, target):
        draft.leave("enable_activation_checkpointing", "another field decides")


TOOL = Tool(
    NAME,
    marks=("*._component_",),
    convert=read_torchtune,
    defaults=DEFAULTS,
    shared=tuple(name for name in RULES if "." not in name),
)
