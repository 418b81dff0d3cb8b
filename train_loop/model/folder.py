"""Config and tokenizer of a spec's model, from the spec or from a Hugging Face folder. Torch-free."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from train_loop.errors import DataError, ModelError
from train_loop.model.weight_map import conversion
from train_loop.plan import ModelShape, read_shape
from train_loop.run_dir import local_path
from train_loop.spec import JobSpec, ModelSpec
from train_loop.system.input_files import read_input

_VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files from which transformers can make a fast tokenizer."""
_PARTS = ("tokenizer_config.json", "chat_template.jinja")
"""Other files of a tokenizer, which a folder of adapters can have."""
_TEXT_PARTS = {kind: f"{kind}_text" for kind in ("qwen3_5", "qwen3_5_moe", "qwen4_exp", "llama4")}
"""Models with other parts, such as vision, of which AutoModelForCausalLM builds and loads only the text part."""


def model_folder(model: ModelSpec) -> Path | None:
    """Return the folder of model.path; None for random weights. Raises ModelError for an unsupported URI."""
    try:
        return None if model.path is None else local_path(model.path)
    except ValueError as error:
        raise ModelError(str(error)) from error


def adapter_folder(model: ModelSpec) -> Path | None:
    """Return the folder of model.adapter; None without one. Raises ModelError for an unsupported URI."""
    try:
        return None if model.adapter is None else local_path(model.adapter)
    except ValueError as error:
        raise ModelError(str(error)) from error


def model_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the Hugging Face config of a model, from the spec or its folder. Raises ModelError.

    It is that of the text part alone if the causal language model of transformers is.
    """
    folder = model_folder(spec)
    config = _read_config(folder) if folder else dict(spec.config or {})
    kind, text = config.get("model_type"), config.get("text_config")
    return {"model_type": _TEXT_PARTS[kind]} | text if kind in _TEXT_PARTS and isinstance(text, dict) else config


def model_shape(model: ModelSpec) -> ModelShape:
    """Return the sizes of a model, from the spec or its folder; those of own code without both. Raises ModelError."""
    if not model.has_source:
        return ModelShape.of_code()
    try:
        config, head = model_config(model), model.label_head
        shape = read_shape(config).adapted(model)
        if model.masked is not None:
            # transformers ties them in all encoders unless the config says otherwise.
            return replace(shape, tied=config.get("tie_word_embeddings", True) is not False)
        return shape if head is None else replace(shape, labels=head.labels, pools=head.pools, tied=False)
    except ValueError as error:
        raise ModelError(str(error)) from error


def tokenizer_folder(spec: JobSpec) -> Path | None:
    """Return the tokenizer's folder, by default that of the adapters or the model; None if it is trained on the data.

    Raises DataError if the folder has no tokenizer.
    """
    model = spec.model
    try:
        folder, adapters = named_tokenizer(model), adapter_folder(model)
    except ValueError as error:
        raise DataError(str(error)) from error
    if folder is None:
        return None
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        remedy = "give the folder of a Hugging Face fast tokenizer"
        if model.tokenizer is None:
            remedy = "set model.tokenizer to a folder with one, or give tokenised rows with columns.input_ids"
        uri = model.tokenizer or (model.adapter if folder == adapters else model.path)
        raise DataError(f"tokenizer.json not found in {uri}; {remedy}")
    return folder


def named_tokenizer(model: ModelSpec) -> Path | None:
    """Return the folder of the tokenizer that a model's spec names, else that of its adapters, else its own.

    Adapters were trained with the tokenizer in their folder, if it has one. Raises ValueError for an unsupported URI.
    """
    adapters = adapter_folder(model)
    if model.tokenizer is not None:
        return local_path(model.tokenizer)
    if adapters is not None and any((adapters / name).is_file() for name in (*_VOCABULARIES, *_PARTS)):
        return adapters
    return model_folder(model)


def _number(found: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object because JSON does not have it, such as infinity."""
    text = found.get("__float__")
    return float(text) if len(found) == 1 and text in ("Infinity", "-Infinity", "NaN") else found


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        text = read_input(folder / "config.json")
    except (FileNotFoundError, NotADirectoryError) as error:
        found = conversion(folder)
        remedy = (
            "; give a model's folder as save_pretrained of transformers writes it, visible from service and workers"
            if found is None
            else f", which holds {found}"
        )
        raise ModelError(f"config.json not found in {folder}{remedy}") from error
    try:
        config = json.loads(text, object_hook=_number)
    except ValueError as error:
        raise ModelError(f"{folder}/config.json is not valid JSON: {error}; copy it again") from error
    except RecursionError as error:
        raise ModelError(f"{folder}/config.json is nested too deeply to be read; copy it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f'model_type not found in {folder}/config.json; add it, for example "model_type": "qwen3"')
    return config
