"""The files of weights that a conversion reads, and the files that it copies. Torch-free."""

import errno
import re
from pathlib import Path
from typing import NamedTuple

from train_loop.checkpoint.manifest import NAME as MANIFEST
from train_loop.checkpoint.manifest import verify
from train_loop.data.text.tokenizer_files import tokenizer_files
from train_loop.errors import UserError
from train_loop.model.weight_map import DCP_METADATA, PICKLES, read_weight_map, some
from train_loop.run_dir import Manifest, RunDir
from train_loop.system.input_files import check_regular, read_input

_INDEX = "pytorch_model.bin.index.json"
_WHOLE = "pytorch_model.bin"
_NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state\w*)\.\w+")
"""Pickles that Trainer of transformers writes next to weights."""
_MOST_FILES = 10_000
_COPIED = re.compile(r"generation_config\.json|(.*processor|.*preprocessor)_config\.json|chat_template\.json|.*\.spm")
"""Files of a model besides those of its tokenizer."""


class Inputs(NamedTuple):
    """The files of one model."""

    pickles: tuple[Path, ...]
    """Files of `torch.save`, sorted; none for a checkpoint."""
    checkpoint: Path | None
    """Folder of a DCP checkpoint; None for pickles."""
    files_by_tensor: dict[str, str]
    """File of each tensor, as an index names them; empty without an index."""
    home: Path
    """Folder of the config and tokenizer that belong to the weights."""

    @property
    def sizes(self) -> list[int]:
        """Sizes of all files in bytes."""
        files = self.pickles if self.checkpoint is None else self.checkpoint.iterdir()
        return [file.stat().st_size for file in files]

    @property
    def run_dir(self) -> RunDir | None:
        """The run directory of one of our own checkpoints; None for other weights."""
        return None if self.checkpoint is None else run_dir_at(self.checkpoint.parent.parent)


def run_dir_at(folder: Path) -> RunDir | None:
    """Return the run directory in a folder, or None."""
    found = RunDir(folder)
    return found if (folder / "spec.json").is_file() and found.checkpoints.is_dir() else None


def find_inputs(given: Path) -> Inputs:
    """Return the files of the weights at a path: a file, or a folder. Raises UserError, OSError."""
    if given.is_file():
        if given.suffix == ".safetensors":
            raise UserError(f"{given} is a safetensors file already; give its folder to model.path")
        return Inputs((_real(given),), None, {}, given.parent)
    if not given.is_dir():
        raise UserError(f"{given} not found; give a file of torch.save, or a folder with one")
    names = sorted(file.name for file in given.iterdir())
    if len(names) > _MOST_FILES:
        raise UserError(f"{given} holds {len(names)} files, and at most {_MOST_FILES} are read; give a model's folder")
    if DCP_METADATA in names:
        return _checkpoint(given, names)
    if any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{given} holds safetensors already; give it to model.path as it is")
    if _INDEX in names:
        index = read_weight_map(_inside(given, _INDEX), "bin")
        return Inputs(tuple(_inside(given, name) for name in sorted(set(index.values()))), None, index, given)
    return Inputs((_inside(given, _only_file(given, names)),), None, {}, given)


def _only_file(folder: Path, names: list[str]) -> str:
    found = [name for name in names if Path(name).suffix in PICKLES and not _NOT_WEIGHTS.fullmatch(name)]
    if _WHOLE in found:
        return _WHOLE
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{folder} holds several files that may be the weights: {some(found)}; give one of them")
    runs = run_dir_at(folder)
    if runs is not None:
        steps = [str(runs.checkpoint(step)) for step in runs.manifests()]
        raise UserError(f"{folder} is a run directory; give one of its checkpoints: {some(steps) or 'it has none'}")
    raise UserError(
        f"{folder} holds no weights; expected {', '.join(f'a {suffix} file' for suffix in PICKLES)}, {_INDEX}, or a "
        f"DCP checkpoint with {DCP_METADATA}"
    )


def _checkpoint(folder: Path, names: list[str]) -> Inputs:
    for name in names:
        _inside(folder, name)
    if MANIFEST in names:
        try:
            faults = verify(folder, Manifest.parse(read_input(folder / MANIFEST).decode()))
        except ValueError as error:
            raise UserError(f"{folder} cannot be read: {error}; choose another checkpoint") from error
        if faults:
            raise UserError(f"the checkpoint in {folder} is damaged: {some(faults)}; choose another checkpoint")
    return Inputs((), folder, {}, folder)


def text_files(home: Path) -> dict[str, bytes]:
    """Return the config, tokenizer and processor files in a model's folder, by name. Raises UserError, OSError.

    Without config.json the folder is not that of a model, and none of its files belongs to the weights.
    """
    if not (home / "config.json").is_file():
        return {}
    names = [file.name for file in home.iterdir() if _COPIED.fullmatch(file.name) and file.is_file()]
    found = {name: read_input(home / name) for name in names} | tokenizer_files(home)
    for name in found:
        _inside(home, name)
    return found


def _inside(folder: Path, name: str) -> Path:
    """Return the real path of a file in a folder. Raises UserError if it is a link to another place."""
    root, real = folder.resolve(), _real(folder / name)
    # In the Hub's cache, files of a snapshot are links to blobs of the same model.
    home = root.parent.parent if root.parent.name == "snapshots" else root
    if not real.is_relative_to(home):
        raise UserError(f"{folder / name} is a link to {real}, outside the folder; copy the file into the folder")
    return real


def _real(path: Path) -> Path:
    """Return the real path of a regular file. Raises UserError, OSError."""
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError as error:
        raise UserError(f"{path} not found; copy the folder again") from error
    except (RuntimeError, OSError) as error:
        # A loop of links is a RuntimeError of pathlib, and an OSError since Python 3.13.
        if isinstance(error, RuntimeError) or error.errno == errno.ELOOP:
            raise UserError(f"{path} is a link to itself; copy the file into the folder") from error
        raise
    check_regular(real, real.stat())
    return real
