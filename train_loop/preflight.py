"""All that can be said of a spec's data and model before anything runs; the service calls it as a helper process.

Reads {"spec": …, "roots": […]} on standard input and prints {"problems": [{"pointer", "message"}]}. A process of its
own, because a damaged file may crash the library that opens it, and torch takes memory that the service need not have.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from train_loop.data.sources import check_allowed, check_columns, is_empty, list_files
from train_loop.errors import DataError, ModelError
from train_loop.model.build import build_model
from train_loop.model.probe import check_attention, check_head, probe
from train_loop.model.tiled_mlp import apply_tiled_mlp
from train_loop.parallel.units import check_names, decoder_layers
from train_loop.run_dir import local_path
from train_loop.spec import DataSpec, JobSpec, Problem, SourceSpec, parse


def check_data(spec: JobSpec, roots: Sequence[str]) -> list[Problem]:
    """The problems with a spec's data and tokenizer: place, existence, columns, emptiness."""
    problems = _source_problems(spec.data.train, "/data/train/path", spec.data, roots)
    if spec.data.eval is not None:
        problems += _source_problems(spec.data.eval, "/data/eval/path", spec.data, roots)
    return problems + _tokenizer_problems(spec, roots)


def check_model(spec: JobSpec) -> list[Problem]:
    """The problems with a spec's model, found by building it on the meta device, which takes no memory."""
    try:
        model = build_model(spec.model)
        seen = probe(model)
    except ModelError as error:
        return [Problem("/model/config", str(error))]
    strategy = spec.strategy
    checks: dict[str, Callable[[], None]] = {
        "/strategy/ulysses_size": lambda: check_attention(seen, spec),
        "/strategy/wrap_policy/transformer_layer_cls_to_wrap": lambda: check_names(model, strategy.wrap_policy),
        "/training/chunked_loss": lambda: check_head(seen, spec),
    }
    if strategy.apply_tiled_mlp:
        checks["/strategy/apply_tiled_mlp"] = lambda: apply_tiled_mlp(
            decoder_layers(model), tiles=strategy.tiled_num_shards
        )
    return [Problem(pointer, fault) for pointer, check in checks.items() if (fault := _fault(check))]


def _fault(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ModelError as error:
        return str(error)
    return None


def _source_problems(source: SourceSpec, pointer: str, data: DataSpec, roots: Sequence[str]) -> list[Problem]:
    try:
        for uri in source.paths:
            check_allowed(uri, roots)
        files = list_files(source)
        if all(is_empty(file) for file in files):
            raise DataError(f"{', '.join(source.paths)} holds no rows; an empty dataset cannot be trained on")
    except (DataError, OSError) as error:
        return [Problem(pointer, str(error))]
    try:
        check_columns(next(file for file in files if not is_empty(file)), data)
    except DataError as error:
        return [Problem("/data/columns", str(error))]
    return []


def _tokenizer_problems(spec: JobSpec, roots: Sequence[str]) -> list[Problem]:
    uri = spec.model.tokenizer
    if uri is None:
        return []
    try:
        check_allowed(uri, roots)
        folder = local_path(uri)
        if not Path(folder, "tokenizer.json").is_file():
            raise DataError(f"{uri} holds no tokenizer.json; give the folder of a Hugging Face fast tokenizer")
    except ValueError as error:
        return [Problem("/model/tokenizer", str(error))]
    return []


def main() -> None:
    """Answer one question on standard input."""
    question = json.load(sys.stdin)
    spec = parse(question["spec"])
    problems = [*check_data(spec, question["roots"]), *check_model(spec)]
    json.dump({"problems": [{"pointer": p.pointer, "message": p.message} for p in problems]}, sys.stdout)


if __name__ == "__main__":
    main()
