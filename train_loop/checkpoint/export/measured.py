"""The README of an export of adapters: its base, how to load it, and how merging changes outputs."""

import copy
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from train_loop.checkpoint.export.adapters import Adapted
from train_loop.checkpoint.weights import stored_buffers
from train_loop.model.build import allocate
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.folder import model_folder
from train_loop.model.load import match_folder
from train_loop.run_dir import ExportWish, write_durably
from train_loop.system.memory_limit import available_bytes

_TOKENS = 32
"""Tokens of the row whose outputs are compared, at most."""
_ROOM = 1.5
"""Memory of a call, relative to that of the weights."""

_ADAPTER = """# Adapters of step {step}

LoRA with r={lora.r} and alpha={lora.alpha:g}, trained on {base}. {loading}
"""
_LOADING = """peft loads it:

```python
from peft import PeftModel
from transformers import {kind}

base = {kind}.from_pretrained({arguments})
model = PeftModel.from_pretrained(base, "<this folder>")
```"""
_ROUNDED = """

The run computed with the base in {kind} (`model.quantize_base`). Outputs on the weights of that folder differ by this
rounding; an export with form dequantized has the model as it was trained."""
_NO_BASE = "peft cannot load it, because no file has these weights: export with form {form} for a whole model."
_MERGED = """# Merged model of step {step}

{base}, with adapters (LoRA, r={lora.r}, alpha={lora.alpha:g}) added in fp32 and rounded once to {dtype}.

{difference}
"""


class Difference(NamedTuple):
    """The outputs of a merged model, compared with those of the model with adapters."""

    tokens: int
    """Number of tokens of the row."""
    largest: float
    """Largest absolute difference."""
    of: float
    """Largest absolute output."""


def describe_adapters(adapted: Adapted, folder: Path, step: int, wish: ExportWish) -> float | None:
    """Write the README of an export, and peft's config. Return the largest difference, if it was measured."""
    if wish.form == "adapter":
        adapted.write_config(folder)
    found = measure(adapted, folder) if wish.form != "adapter" else None
    told = "The outputs were not compared with those of the model with adapters: that needs more memory."
    if found is not None:
        told = (
            f"For a row of {found.tokens} tokens, computed in fp32, its outputs differ from those of the model with "
            f"adapters by at most {found.largest:.3g}; the largest output is {found.of:.3g}."
        )
    path, kind = adapted.spec.model.path, adapted.spec.model.quantize_base
    base = path or f"random weights of training.seed {adapted.spec.training.seed}"
    if wish.form == "adapter":
        rounded = "" if kind is None else _ROUNDED.format(kind=kind)
        whole = "merged" if kind is None else "dequantized"
        loading = _NO_BASE.format(form=whole) if path is None else _loading(adapted) + rounded
        text = _ADAPTER.format(step=step, base=base, lora=adapted.lora, loading=loading)
    else:
        base = f"The weights of {path}" if path else base.capitalize()
        base += "" if kind is None else f", rounded to {kind} and restored"
        text = _MERGED.format(step=step, base=base, lora=adapted.lora, dtype=wish.dtype, difference=told)
    write_durably(folder / "README.md", text)
    return None if found is None else found.largest


def _loading(adapted: Adapted) -> str:
    """Return how a user loads the adapters."""
    labels = adapted.plain.labels
    of_labels = f", num_labels={labels}" if labels else ""
    arguments = f"{json.dumps(str(model_folder(adapted.spec.model)))}{of_labels}"
    return _LOADING.format(kind=type(adapted.plain.model).__name__, arguments=arguments)


def measure(adapted: Adapted, folder: Path) -> Difference | None:
    """Compare the outputs of an exported folder with those of the model with adapters, both computed in fp32.

    Return None if a model in fp32 does not fit in this machine's memory.
    """
    parameters = sum(p.numel() for p in adapted.anatomy.model.parameters())
    left = available_bytes()
    if left is not None and 4 * _ROOM * parameters > left:
        return None
    homes = match_folder(adapted.plain, folder).homes

    def exported(name: str) -> Tensor:
        stored = homes[name][0]
        return stored.read(tuple(slice(0, size) for size in stored.shape))

    plain = adapted.plain.family.anatomy(copy.deepcopy(adapted.plain.model))
    # A model may have no positions beyond those of the run.
    tokens = min(_TOKENS, adapted.spec.positions)
    merged = _outputs(adapted, plain, exported, tokens)
    with_adapters = _outputs(adapted, adapted.anatomy, adapted.read, tokens)
    return Difference(tokens, float((merged - with_adapters).abs().max()), float(with_adapters.abs().max()))


def _outputs(adapted: Adapted, built: Anatomy, read: Callable[[str], Tensor], tokens: int) -> Tensor:
    """Return the outputs of a model with the weights that `read` returns, for a row of random tokens."""
    family, cpu = built.family, torch.device("cpu")
    model, kept = built.model.float(), stored_buffers(built.model)
    family.choose_attention(model, adapted.spec, cpu)
    allocate(model, adapted.plain, device=cpu, stored=stored_buffers(adapted.plain.model))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in kept or isinstance(tensor, nn.Parameter):
            tensor.data.copy_(read(name))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(built.vocabulary or 2, (1, tokens), generator=generator)
    columns = {
        "input_ids": ids,
        "position_ids": torch.arange(tokens).expand(1, tokens),
        "length": torch.tensor([tokens]),
    }
    with torch.no_grad():
        return family.call(model.eval(), columns, family.arguments(model, columns))
