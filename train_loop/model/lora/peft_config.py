"""The settings of adapters in a folder that peft wrote (`model.adapter`), as a spec has them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from train_loop.errors import DataError, ModelError
from train_loop.model.folder import adapter_folder
from train_loop.model.load import Stored, read_headers
from train_loop.model.lora.saved import OF_LABELS
from train_loop.model.weight_map import PICKLES, some
from train_loop.spec import AnyJobSpec, LoraSpec, ModelSpec, dump, load, with_lora
from train_loop.system.input_files import read_input

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model"
"""Stem of the names of files with the weights of adapters."""
PREFIX = "base_model.model."
"""Prefix of a model's names in peft."""
_FIELDS = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "target_parameters": "target_parameters",
    "modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "init": "init_lora_weights",
    "layers": "layers_to_transform",
}
"""peft's name of each field of `model.lora`."""
_OF_TENSORS = ("target_modules", "target_parameters", "modules_to_save", "layers")
"""Fields that may name the same tensors in other words."""
_NO_EFFECT = {
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
    *("inference_mode", "fan_in_fan_out", "runtime_config", "megatron_core", "qalora_group_size"),
    *("exclude_modules", "layers_pattern", "eva_config", "corda_config", "loftq_config", "lora_ga_config"),
}
"""Fields of peft that change nothing here: the names of stored tensors show which modules have adapters."""
_SAME_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""First values of adapters that leave the frozen weights unchanged; others change these, too."""
_BASE = ".base_layer"
_MOST_ENTRIES = 100_000
_OF_LABELS = ("SEQ_CLS", "TOKEN_CLS")
"""Tasks for which peft itself trains heads whole."""


@dataclass(frozen=True)
class AdapterFolder:
    """Adapters in a folder that peft wrote."""

    folder: Path
    lora: LoraSpec
    base: str | None
    """Name of the model that they were trained on, as the folder has it."""
    version: tuple[int, ...]
    """Version of peft that wrote it; (0,) if it has none."""
    tensors: Mapping[str, Stored]
    """Stored tensors by their names without peft's prefix."""


def with_adapter(spec: AnyJobSpec) -> AnyJobSpec:
    """Return a spec with `model.lora` as the folder of `model.adapter` has it; unchanged without a folder.

    A spec with `model.lora` keeps its own names of targets: the folder's tensors show whether they are the same.
    Raises ModelError for a folder that cannot be used or contradicts the spec, SpecError for settings that do not go
    with adapters, DataError for files that must not be read.
    """
    folder = adapter_folder(spec.model)
    if folder is None:
        return spec
    found, given = read_adapter(folder).lora, spec.model.lora
    if given is not None and (differ := [*_contradictions(given, found)]):
        raise ModelError(
            f"model.lora contradicts {folder / CONFIG}: {'; '.join(differ)}; remove model.lora, whose settings "
            "the folder has"
        )
    # With the rules between adapters and other settings.
    return load(dump(with_lora(spec, given or found)))


def task_type(model: ModelSpec) -> str | None:
    """Return peft's name of a model's task; None for masked language models, for which peft has none."""
    head = model.label_head
    if head is None:
        return "CAUSAL_LM" if model.masked is None else None
    if head.embedding is not None:
        return "FEATURE_EXTRACTION"
    return "SEQ_CLS" if head.pools else "TOKEN_CLS"


def other_base(model: ModelSpec) -> str | None:
    """Return a warning if the folder of model.adapter names another base than model.path; else None."""
    folder = adapter_folder(model)
    if folder is None or model.path is None:
        return None
    base = read_adapter(folder).base
    if base is None or _last(base) == _last(model.path):
        return None
    return (
        f"model.adapter was trained on {base:.200} by its {CONFIG}, and model.path is {model.path}; check that "
        "both are the same weights"
    )


def read_adapter(folder: Path) -> AdapterFolder:
    """Return the adapters in a folder, without their values. Raises ModelError for unsupported settings, DataError."""
    config, tensors = _read_config(folder), _read_tensors(folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            f"{folder / CONFIG} has peft_type={kind!r:.60}, and only LORA is supported; name another folder"
        )
    if refused := [*_unsupported(config)]:
        raise ModelError(
            f"{folder / CONFIG} has settings that are not supported: {some(refused)}; train adapters without them, or "
            "merge them into the model with peft (merge_and_unload), and give the result to model.path"
        )
    if long := next((name for name, one in config.items() if isinstance(one, list) and len(one) > _MOST_ENTRIES), None):
        raise ModelError(
            f"{folder / CONFIG} has {len(config[long])} entries in {long}; at most {_MOST_ENTRIES} are read, name fewer"
        )
    try:
        lora = LoraSpec.model_validate_json(json.dumps(_settings(config, tensors)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"an invalid {_FIELDS[str(first['loc'][0])]}" if first["loc"] else "invalid settings"
        message = first["msg"].removeprefix("Value error, ")
        raise ModelError(f"{folder / CONFIG} has {what}: {message}; name another folder") from error
    base = config.get("base_model_name_or_path")
    return AdapterFolder(folder, lora, base if isinstance(base, str) and base else None, _version(config), tensors)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        found: Any = json.loads(read_input(path))
    except FileNotFoundError as error:
        raise ModelError(f"{path} not found; give a folder that save_pretrained of peft wrote") from error
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a mapping of settings; copy it again")
    return found


def _read_tensors(folder: Path) -> dict[str, Stored]:
    if not any((folder / f"{WEIGHTS}{end}").is_file() for end in (".safetensors", ".safetensors.index.json")):
        pickle = next((f"{WEIGHTS}{end}" for end in PICKLES if (folder / f"{WEIGHTS}{end}").is_file()), None)
        if pickle is None:
            raise ModelError(
                f"{folder} holds no {WEIGHTS}.safetensors; give a folder that save_pretrained of peft wrote"
            )
        raise ModelError(
            f'{folder} holds {pickle}, and jobs read no pickles; convert it there with python -c "import torch; '
            "from safetensors.torch import save_file; "
            f"save_file(torch.load('{pickle}', weights_only=True), '{WEIGHTS}.safetensors')\""
        )
    return {name.removeprefix(PREFIX): stored for name, stored in read_headers(folder, WEIGHTS).items()}


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that change what adapters compute and that `model.lora` does not have."""
    init = config.get("init_lora_weights", True)
    if init not in _SAME_BASE:
        yield f"init_lora_weights={init!r:.60} (it has changed the frozen weights)"
    for name, value in config.items():
        if name not in _NO_EFFECT and name not in _FIELDS.values() and value and (name, value) != ("bias", "none"):
            yield f"{name}={json.dumps(value):.60}"


def _settings(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """Return the fields of `model.lora`; fields that the config lacks have peft's defaults."""
    modules, parameters = config.get("target_modules"), _names(config, "target_parameters")
    layers, init = config.get("layers_to_transform"), config.get("init_lora_weights", True)
    is_pattern = isinstance(modules, str) or (modules is None and not parameters)
    if is_pattern or config.get("exclude_modules") or (layers is not None and parameters):
        names, layers = [*_adapted(tensors, parameters)], None
    else:
        names = _names(config, "target_modules")
    saved = _names(config, "modules_to_save")
    if config.get("task_type") in _OF_LABELS:
        # A head of labels is always trained.
        saved = [name for name in saved if name not in OF_LABELS]
    return {
        "r": config.get("r", 8),
        "alpha": config.get("lora_alpha", 8),
        "dropout": config.get("lora_dropout", 0.0),
        "target_modules": names,
        "target_parameters": parameters,
        "modules_to_save": saved,
        "use_rslora": config.get("use_rslora", False),
        "use_dora": config.get("use_dora", False),
        "init": "gaussian" if init == "gaussian" else "kaiming",
        "layers": [layers] if isinstance(layers, int) else layers,
    }


def _names(config: Mapping[str, Any], field: str) -> list[str]:
    """Return a list of names, sorted, because peft keeps some as sets. Raises ModelError."""
    names = config.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"{field} in {CONFIG} is {json.dumps(names):.60}, and not a list of names; copy the folder again"
        )
    return sorted(names)


def _adapted(tensors: Mapping[str, Stored], parameters: list[str]) -> Iterator[str]:
    """Yield the full names of modules with stored adapters, without those whose parameters are targets."""
    holders = {name.rpartition(".")[0] for name in parameters}
    for name in tensors:
        module, lora, _ = name.partition(".lora_A.")
        if lora and holders.isdisjoint(_ends(_without_layers(module))):
            yield module


def _without_layers(module: str) -> str:
    """Return the name of a module without the parts that peft adds for adapters around others."""
    end = len(module)
    while module.endswith(_BASE, 0, end):
        end -= len(_BASE)
    return module[:end]


def _ends(name: str) -> Iterator[str]:
    """Yield a name and its ends after each dot."""
    steps = name.split(".")
    return (".".join(steps[start:]) for start in range(len(steps)))


def _contradictions(given: LoraSpec, found: LoraSpec) -> Iterator[str]:
    for name, theirs in _FIELDS.items():
        here, there = getattr(given, name), getattr(found, name)
        if name not in _OF_TENSORS and here != there:
            yield f"{name}={here} and {theirs}={there}"


def _version(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a version such as 0.19.1 or 0.19.2.dev0@main."""
    found = re.match(r"\d+(\.\d+)*", str(config.get("peft_version", "")))
    return (0,) if found is None else tuple(map(int, found[0].split(".")))


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
