"""Weights of any origin as safetensors: the same bits, or refused by name, without running code of a file."""

import json
import os
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.builders.tensors import tensor_checkpoint
from train_loop.checkpoint.files.metadata import parse_metadata
from train_loop.errors import CheckpointError, UserError
from train_loop.run_dir import RunDir
from train_loop.weights.inputs import find_inputs, text_files
from train_loop.weights.result import Converted
from train_loop.weights.write import write_weights

BASE = torch.arange(24, dtype=torch.float32).view(4, 6)
STATE: dict[str, Tensor] = {
    "model.embed.weight": BASE,
    "lm_head.weight": BASE,
    "model.turned": BASE.t(),
    "model.part": BASE[1:3, 2:],
    "model.half": BASE.to(torch.bfloat16),
    "model.double": BASE.double(),
    "model.small": BASE.to(torch.float8_e4m3fn),
    "model.counts": torch.tensor([1, 2**40]),
    "model.mask": torch.tensor([True, False, True]),
    "model.scalar": torch.tensor(3.5),
    "model.empty": torch.empty(0, 3),
    "model.nan": torch.tensor([float("nan"), -0.0]),
}
OLD = {name: one for name, one in STATE.items() if name != "model.small"}
"""Tensors that torch could save before version 1.6."""


def write(source: Path, target: Path, *, shard_bytes: int = 10**9, entry: str | None = None) -> Converted:
    target.mkdir()
    return write_weights(find_inputs(source), target, shard_bytes=shard_bytes, entry=entry)


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def bits(state: dict[str, Tensor]) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        name: (str(one.dtype), list(one.shape), bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy().data))
        for name, one in state.items()
    }


def plain_file(folder: Path) -> Path:
    torch.save(STATE, folder / "weights.pt")
    return folder / "weights.pt"


def parameters(folder: Path) -> Path:
    torch.save({n: nn.Parameter(t, requires_grad=t.is_floating_point()) for n, t in STATE.items()}, folder / "w.ckpt")
    return folder / "w.ckpt"


def old_format(folder: Path) -> Path:
    torch.save(OLD, folder / "old.bin", _use_new_zipfile_serialization=False)
    return folder


def several_files(folder: Path) -> Path:
    names = list(STATE)
    files = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, held in files.items():
        torch.save({name: STATE[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"lr": 1.0}, folder / "training_args.bin")
    return folder


def torchs_checkpoint(folder: Path) -> Path:
    values = {"model": {name: one.contiguous() for name, one in STATE.items()}, "optim": {"step": 3, "m": BASE}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(values, storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)
    return folder / "dcp"


def our_checkpoint(folder: Path) -> Path:
    values = {"model": {name: one.contiguous() for name, one in STATE.items()}, "ema": {"a": BASE}, "rng/rank-0": b"x"}
    return tensor_checkpoint(RunDir(folder / "run"), 20, values)


FORMS = [plain_file, parameters, old_format, several_files, torchs_checkpoint, our_checkpoint]


@pytest.mark.parametrize("form", FORMS)
def test_tensors_keep_names_dtypes_and_bits(tmp_path: Path, form: Callable[[Path], Path]) -> None:
    (tmp_path / "in").mkdir()
    done = write(form(tmp_path / "in"), tmp_path / "out")
    expected = OLD if form is old_format else STATE
    assert bits(read(tmp_path / "out")) == bits(expected)
    assert (done.tensors, done.dtype, done.files) == (len(expected), None, ["model.safetensors"])
    assert done.bytes == sum(one.nbytes for one in expected.values())


def test_large_weights_are_split_into_files_with_an_index(tmp_path: Path) -> None:
    done = write(plain_file(tmp_path), tmp_path / "out", shard_bytes=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(done.files) > 2
    assert sorted(set(index["weight_map"].values())) == done.files
    assert index["metadata"]["total_size"] == done.bytes
    assert bits(read(tmp_path / "out")) == bits(STATE)


SMALL = {"a": torch.ones(2), "b": torch.zeros(3)}


@pytest.mark.parametrize(
    ("value", "entry", "notes"),
    [
        (
            {"state_dict": SMALL, "epoch": 3, "optimizer": {0: SMALL}},
            None,
            ["took state_dict, and left out epoch, opt"],
        ),
        ({"model": {"state_dict": SMALL}}, None, ["took model", "took state_dict"]),
        ({f"module.{name}": one for name, one in SMALL.items()}, None, ["removed module. from the beginning of all 2"]),
        (
            {"model": {f"_orig_mod.module.{name}": one for name, one in SMALL.items()}, "lr": 0.1},
            None,
            ["took model, and left out lr", "removed _orig_mod.", "removed module."],
        ),
        # Layers that were compiled, recomputed and wrapped one by one.
        (
            {"_fsdp_wrapped_module.a": SMALL["a"], "_orig_mod._checkpoint_wrapped_module.b": SMALL["b"]},
            None,
            ["removed _checkpoint_wrapped_module, _fsdp_wrapped_module, _orig_mod from 2 names"],
        ),
        ({"model": SMALL, "teacher": {"a": torch.ones(1)}}, "model", ["took model, and left out teacher"]),
        ({"weights": SMALL, "other": SMALL}, "weights", ["took weights, and left out other"]),
        ({"a": SMALL["a"], "b": SMALL["b"]}, None, []),
        ({"a": SMALL["a"], "b": SMALL["b"], "module.a": SMALL["a"]}, None, ["wrote shared tensors under each name: m"]),
    ],
)
def test_state_dicts_are_found_and_unwrapped(tmp_path: Path, value: Any, entry: str | None, notes: list[str]) -> None:
    torch.save(value, tmp_path / "x.pt")
    done = write(tmp_path / "x.pt", tmp_path / "out", entry=entry)
    assert {name: one.tolist() for name, one in read(tmp_path / "out").items() if name in SMALL} == {
        name: one.tolist() for name, one in SMALL.items()
    }
    assert len(done.notes) == len(notes)
    assert all(found.startswith(note) for found, note in zip(done.notes, notes, strict=True)), done.notes


def test_nested_dicts_of_tensors_get_dotted_names(tmp_path: Path) -> None:
    torch.save({"encoder": {"layer": SMALL}, "head": torch.ones(1)}, tmp_path / "x.pt")
    write(tmp_path / "x.pt", tmp_path / "out")
    assert sorted(read(tmp_path / "out")) == ["encoder.layer.a", "encoder.layer.b", "head"]


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["again"] = value
    return value


def many() -> dict[str, Any]:
    """Return dicts that hold each other: ten to the power of eight entries in a small file."""
    value: dict[str, Any] = {"x": torch.ones(1)}
    for _ in range(7):
        value = {str(number): value for number in range(10)}
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (SMALL | {"steps": 3}, "only tensors can be converted, and the state dict also holds steps (of type int); rem"),
        (SMALL | {"all": [torch.ones(1)]}, "also holds all (of type list)"),
        ({1: torch.ones(1), "t": {"x": b"1"}}, "also holds t.x (of type bytes)"),
        (torch.ones(2), "'' is not a name for a tensor in safetensors"),
        ([torch.ones(2)], "also holds the file itself (of type list)"),
        ({"s": torch.ones(2, 2).to_sparse()}, "also holds s (a tensor of sparse_coo torch.float32)"),
        ({"c": torch.ones(2, dtype=torch.complex64)}, "also holds c (a tensor of strided torch.complex64)"),
        ({"model": SMALL, "net": SMALL}, "it holds several state dicts: model, net; choose one with --entry"),
        (
            {"model": SMALL, "head": {"w": torch.ones(1)}},
            "next to model, it holds tensors in head; choose what to conv",
        ),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two tensors would have the name a.b; rename one of them"),
        ({"epoch": 3}, "also holds epoch (of type int)"),
        ({}, "it holds no tensors; give the file of a model's state dict"),
        ({"x": torch.ones(1).expand(10**7)}, "the tensors have 40000000 bytes, and the files"),
        ({"x" * 300: torch.ones(1)}, "has a key of 300 characters; at most 256 are read"),
        (endless(), "holds over 8 dicts inside each other; give a plain state dict"),
        (many(), "holds over 200000 entries; give the state dict of one model"),
    ],
)
def test_file_with_anything_else_is_refused_by_name(tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(UserError, match=re.escape(message)):
        write(tmp_path / "x.pt", tmp_path / "out")


class Call:
    """An object whose unpickling calls `function`."""

    def __init__(self, function: Callable[..., Any], args: tuple[object, ...]) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.reduced


def evil(folder: Path) -> Call:
    """Return an object whose unpickling creates a folder."""
    return Call(os.mkdir, (str(folder),))


def test_code_in_a_pickle_is_named_and_does_not_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": evil(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(
        UserError, match=r"holds \w+\.mkdir, which is neither a tensor nor a container of tensors, and its"
    ):
        write(tmp_path / "x.pt", tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_code_in_the_metadata_of_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    folder = torchs_checkpoint(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(evil(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"it names \w+\.mkdir, which is not part of a checkpoint's metadata"):
        write(folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_metadata_of_the_first_releases_of_python_3_11_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = torchs_checkpoint(tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    content = pickle.dumps(metadata)
    assert b"getattr" in content
    assert parse_metadata(content, tmp_path) == metadata


def test_metadata_that_read_an_attribute_of_a_class_are_refused(tmp_path: Path) -> None:
    content = pickle.dumps(Call(getattr, (Metadata, "__init__")))
    with pytest.raises(CheckpointError, match=r"it reads an attribute of <class '.*Metadata'>, which is not part of"):
        parse_metadata(content, tmp_path)


def test_checkpoint_with_files_or_chunks_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = torchs_checkpoint(tmp_path)
    content = (folder / ".metadata").read_bytes()

    def refused(change: Callable[[Any], None], message: str) -> None:
        found = pickle.loads(content)
        change(found)
        (folder / ".metadata").write_bytes(pickle.dumps(found))
        target = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        with pytest.raises(CheckpointError, match=message):
            write(folder, target)

    def elsewhere(found: Any) -> None:
        (tmp_path / "other").write_bytes(b"x")
        for place in found.storage_data.values():
            place.relative_path = "../other"

    def beyond(found: Any) -> None:
        chunk = found.state_dict_metadata["model.lm_head.weight"].chunks[0]
        chunk.sizes = torch.Size([9, 6])

    refused(elsewhere, "names the file '../other' outside its folder; copy the checkpoint again")
    refused(beyond, "has chunks that do not cover it once")


def broken(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def two_files(folder: Path) -> Path:
    broken(folder / "a.bin", b"x")
    return broken(folder / "b.pt", b"x").parent


def other_content(folder: Path) -> Path:
    several_files(folder)
    torch.save(SMALL, folder / "pytorch_model-2.bin")
    return folder


def link_out(folder: Path) -> Path:
    (folder / "in").mkdir()
    (folder / "in" / "a.bin").symlink_to(plain_file(folder))
    return folder / "in"


def link_to_itself(folder: Path) -> Path:
    (folder / "a.bin").symlink_to(folder / "a.bin")
    return folder


def index_out(folder: Path) -> Path:
    return broken(folder / "pytorch_model.bin.index.json", b'{"weight_map": {"x": "../a.bin"}}').parent


def half_a_file(folder: Path) -> Path:
    return broken(folder / "a.pt", plain_file(folder).read_bytes()[:2000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f / "none", "none not found; give a file of torch.save, or a folder"),
        (lambda f: broken(f / "a.safetensors", b""), "is a safetensors file already; give its folder to model.path"),
        (
            lambda f: broken(f / "a.safetensors", b"").parent,
            "holds safetensors already; give it to model.path as it is",
        ),
        (two_files, "may be the weights: a.bin, b.pt; give one of them"),
        (lambda f: f, "holds no weights; expected a .bin file, a .pt file"),
        (lambda f: broken(f / "a.bin", b"no"), "a.bin is not a complete file of torch.save: .*; copy it again"),
        (half_a_file, "a.pt is not a complete file of torch.save"),
        (index_out, "names files that are not bin files of the folder: ../a.bin"),
        (
            other_content,
            "the index names tensors that the files do not contain: model.counts, model.double, model.empty",
        ),
        (link_out, "is a link to .*, outside the folder; copy the file into the folder"),
        (link_to_itself, "is a link to itself; copy the file into the folder"),
    ],
)
def test_path_without_readable_weights_is_refused(tmp_path: Path, spoil: Callable[[Path], Path], message: str) -> None:
    (tmp_path / "given").mkdir()
    with pytest.raises(UserError, match=message):
        write(spoil(tmp_path / "given"), tmp_path / "out")


def test_snapshot_of_the_hub_has_links_to_its_blobs(tmp_path: Path) -> None:
    home = tmp_path / "models--x--y"
    snapshot = home / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    torch.save(SMALL, home / "blobs" / "abc")
    (snapshot / "pytorch_model.bin").symlink_to("../../blobs/abc")
    write(snapshot, tmp_path / "out")
    assert sorted(read(tmp_path / "out")) == ["a", "b"]


def test_files_of_config_and_tokenizer_are_those_beside_the_weights(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "generation_config.json", "modeling.py", "notes.txt"):
        (tmp_path / name).write_text("{}")
    assert text_files(tmp_path) == {}, "a folder without config.json is not that of the model"
    (tmp_path / "config.json").write_text("{}")
    assert sorted(text_files(tmp_path)) == ["config.json", "generation_config.json", "tokenizer.json"]
    (tmp_path.parent / "secret").write_text("x")
    (tmp_path / "vocab.txt").symlink_to(tmp_path.parent / "secret")
    with pytest.raises(UserError, match=r"vocab\.txt is a link to .*, outside the folder"):
        text_files(tmp_path)
