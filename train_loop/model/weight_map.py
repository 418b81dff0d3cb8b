"""Indexes of weights in several files, and the remedy for folders whose weights are pickles. Torch-free."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from train_loop.errors import ModelError
from train_loop.system.input_files import read_input

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Ends of the names of files that `torch.save` wrote."""
DCP_METADATA = ".metadata"
"""Name of the file that makes a folder a checkpoint of torch.distributed.checkpoint (DCP)."""
_SHOWN = 3


def read_weight_map(path: Path, suffix: str) -> dict[str, str]:
    """Return the file of each tensor from an index. Raises FileNotFoundError, and ModelError for an invalid index.

    Each file is one of the index's folder, and its name ends in `suffix`.
    """
    text = read_input(path)
    try:
        index: dict[str, str] = json.loads(text)["weight_map"]
        names = set(index.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"weight_map not found in {path}; copy it again") from error
    # A name that points outside the folder could also point outside the storage roots.
    strange = sorted(str(name) for name in names if not re.fullmatch(rf"[^\W_][\w.-]*\.{suffix}", str(name)))
    if strange:
        raise ModelError(
            f"{path} names files that are not {suffix} files of the folder: {some(strange)}; copy it again"
        )
    return index


def conversion(folder: Path) -> str | None:
    """Return what a folder holds instead of safetensors, and the command that converts it; None if it holds neither."""
    names = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLES)
    if (folder / DCP_METADATA).is_file():
        names.insert(0, "a checkpoint of torch.distributed.checkpoint")
    if not names:
        return None
    command = shlex.join(["trainshed", "weights", "convert", str(folder), f"{str(folder).rstrip('/')}-safetensors"])
    return f"{', '.join(names[:_SHOWN])}, and jobs read no pickles; run `{command}`, and give the new folder"


def some(items: Sequence[str]) -> str:
    """Return the first few items, then the number of the rest."""
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
