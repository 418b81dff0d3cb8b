"""The rules by which a folder of sentence-transformers embeds texts: `modules.json` and the files that it names."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_loop.errors import DataError, ModelError
from train_loop.spec.heads import Pooling
from train_loop.system.input_files import read_input

MODULES = "modules.json"
_MODEL = "config_sentence_transformers.json"
_LIBRARY = "sentence_transformers."
"""Begin of the names of the library's own modules; others are code of the folder."""
_TRANSFORMERS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Files with the settings of the first module, of which the first one counts."""
POOLINGS: Mapping[str, Pooling] = {"lasttoken": "last_token", "mean": "mean", "cls": "cls"}
"""Each pooling that is supported, by its name there."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Older switches of poolings."""
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    **dict.fromkeys(("processing_kwargs", "query_length", "document_length", "query_expansion"), ({},)),
}
"""Values of settings of the first module that change nothing here; null is always one."""
_ARGUMENTS = ("model_args", "model_kwargs", "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs")
_WITHOUT_EFFECT = {
    *("trust_remote_code", "attn_implementation", "torch_dtype", "dtype", "device_map", "low_cpu_mem_usage"),
    *("padding_side", "use_fast", "add_pooling_layer", "use_safetensors", "revision", "model_max_length"),
}
"""Arguments that change no vector, or that are read themselves."""
_KNOWN = {*_SETTINGS, *_ARGUMENTS, "max_seq_length", "do_lower_case", "modality_config", "unpad_inputs"}
_NO_LIMIT = 10**9
"""Tokenizers without a limit have a larger one."""
_REMEDY = "name another model, or write the vectors with sentence-transformers"


@dataclass(frozen=True)
class SentenceRules:
    """The rules of a folder."""

    folder: Path
    pooling: Pooling
    normalize: bool
    longest: int | None
    """Number of tokens to which texts are truncated; None without a limit."""
    lower_case: bool
    """True if texts are in lower case before they are tokenised."""
    prompts: tuple[str, ...]
    """Names of texts that `encode_query` and the like put before texts; `encode` has none."""


def read_sentence_rules(folder: Path) -> SentenceRules | None:
    """Return the rules that a folder states; None if it has none. Raises ModelError for those that are not supported.

    Only files of the folder are read, and those of the folders in it that `modules.json` names.
    """
    modules = _read(folder / MODULES, list)
    settings = next((found for name in _TRANSFORMERS if (found := _read(folder / name, dict)) is not None), None)
    if modules is None:
        if settings is not None or (folder / "1_Pooling").is_dir():
            raise ModelError(
                f"{folder} is a part of a folder of sentence-transformers, and has no {MODULES}, which states how "
                "texts are embedded; give the whole folder, or set pooling and normalize in model.head.embedding"
            )
        return None
    places = _places(folder, modules)
    for place in places[1:]:
        _check_normalisation(folder / place / "config.json")
    options = _read(folder / _MODEL, dict) or {}
    if fault := next(_faults(settings or {}, options), None):
        raise ModelError(f"{folder} embeds texts with {fault}, which is not supported; {_REMEDY}")
    return SentenceRules(
        folder=folder,
        pooling=_pooling(folder / places[0] / "config.json"),
        normalize=len(places) > 1,
        longest=_longest(folder, settings or {}),
        lower_case=bool((settings or {}).get("do_lower_case")),
        prompts=tuple(sorted(name for name, text in _prompts(options).items() if text)),
    )


def _places(folder: Path, modules: list[Any]) -> list[str]:
    """Return the folders of the modules after the first: of the pooling, then of normalisations. Raises ModelError."""
    for number, one in enumerate(modules):
        if not isinstance(one, dict) or not isinstance(one.get("type"), str) or not isinstance(one.get("path"), str):
            raise ModelError(f"{folder / MODULES} is not a list of modules with type and path; copy it again")
        kind = one["type"].rpartition(".")[2] if one["type"].startswith(_LIBRARY) else one["type"]
        wanted = ("Transformer", "Pooling")[number] if number < 2 else "Normalize"
        if kind != wanted:
            raise ModelError(
                f"{folder / MODULES} has the module {kind!r:.100} as number {number}, and only Transformer, Pooling "
                f"and then Normalize are supported; {_REMEDY}"
            )
        if number and Path(one["path"]).name != one["path"]:
            raise ModelError(
                f"{folder / MODULES} names {one['path']!r:.100}, which is not a folder in it; copy it again"
            )
    if len(modules) < 2:
        raise ModelError(f"{folder / MODULES} has no module Pooling, which makes one vector of a text; {_REMEDY}")
    if modules[0]["path"] not in ("", "."):
        raise ModelError(
            f"{folder / MODULES} has the model in {modules[0]['path']!r:.100}, as old versions wrote it; save the "
            "folder again with sentence-transformers: SentenceTransformer(folder).save(new_folder)"
        )
    return [one["path"] for one in modules[1:]]


def _pooling(file: Path) -> Pooling:
    config = _read(file, dict)
    if config is None:
        raise ModelError(f"{file} not found, which states the pooling; copy it again")
    stated = config.get("pooling_mode")
    if stated is None:
        chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
        stated = [_MODES.get(name, name) for name in chosen] or "mean"
    modes = stated if isinstance(stated, list) else [stated]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ModelError(
            f"{file} has the pooling {' and '.join(map(str, modes)):.100}, and only one of {', '.join(POOLINGS)} is "
            f"supported; {_REMEDY}"
        )
    return POOLINGS[modes[0]]


def _check_normalisation(file: Path) -> None:
    config = _read(file, dict) or {}
    if any(config.get(f"module_{side}_name") not in (None, "sentence_embedding") for side in ("input", "output")):
        raise ModelError(f"{file} normalises something else than the vectors of texts; {_REMEDY}")


def _faults(settings: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of the first module and of the whole that change vectors and are not supported."""
    for name, value in settings.items():
        fits = value is None or name not in _SETTINGS or value in _SETTINGS[name]
        if name not in _KNOWN or not fits:
            yield f"{name}={json.dumps(value):.100}"
    for name in _ARGUMENTS:
        for argument, value in (settings.get(name) or {}).items():
            if argument not in _WITHOUT_EFFECT:
                yield f"{name}.{argument}={json.dumps(value):.100}"
    text = (settings.get("modality_config") or {"text": _TEXT}).get("text")
    if not isinstance(text, dict) or {name: text.get(name) for name in _TEXT} != _TEXT:
        yield f"modality_config.text={json.dumps(text):.100}"
    if options.get("model_type") not in (None, "SentenceTransformer"):
        yield f"model_type={json.dumps(options['model_type']):.100}"
    if options.get("truncate_dim") is not None:
        yield f"truncate_dim={json.dumps(options['truncate_dim']):.100}"
    default = options.get("default_prompt_name")
    if default is not None and _prompts(options).get(default) != "":
        yield f"default_prompt_name={json.dumps(default):.100}, a prompt before each text"


def _prompts(options: Mapping[str, Any]) -> Mapping[str, Any]:
    found = options.get("prompts") or {}
    return found if isinstance(found, dict) else {"prompts": found}


def _longest(folder: Path, settings: Mapping[str, Any]) -> int | None:
    """Return the maximum tokens of a text: a setting of the first module, or else that of the tokenizer."""
    arguments = (settings.get(name) or {} for name in ("processor_kwargs", "tokenizer_args"))
    tokenizer = _read(folder / "tokenizer_config.json", dict) or {}
    own = next((one["model_max_length"] for one in arguments if "model_max_length" in one), None)
    stated = (own, settings.get("max_seq_length"), tokenizer.get("model_max_length"))
    found = next((value for value in stated if value is not None), None)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return int(found) if found is not None and is_number and 0 < found < _NO_LIMIT else None


def _read(file: Path, kind: type[Any]) -> Any:
    """Return a JSON file's content; None if it does not exist. Raises ModelError."""
    try:
        found = json.loads(read_input(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}; copy it again") from error
    if not isinstance(found, kind):
        raise ModelError(f"{file} holds a JSON {type(found).__name__}; copy it again")
    return found
