"""All that can be said of a spec's data and model before anything runs; the service calls it as a helper process.

Reads {"spec": …, "roots": […]} on standard input and prints {"problems": [{"pointer", "message"}]}. A process of its
own, because a damaged file may crash the library that opens it, and torch takes memory that the service need not have.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from train_loop.data.sources import check_allowed, check_columns, is_empty, list_files
from train_loop.errors import DataError, ModelError
from train_loop.model.build import build_model
from train_loop.model.freeze import freeze
from train_loop.run_dir import local_path
from train_loop.spec import JobSpec, Problem, parse


def check_data(spec: JobSpec, roots: Sequence[str]) -> list[Problem]:
    """The problems with a spec's data and tokenizer: place, existence, columns, emptiness."""
    problems = []
    try:
        for uri in spec.data.train.paths:
            check_allowed(uri, roots)
        files = list_files(spec.data.train)
        if all(is_empty(file) for file in files):
            raise DataError(f"{', '.join(spec.data.train.paths)} holds no rows; an empty dataset cannot be trained on")
    except (DataError, OSError) as error:
        problems.append(Problem("/data/train/path", str(error)))
    else:
        try:
            check_columns(next(file for file in files if not is_empty(file)), spec.data)
        except DataError as error:
            problems.append(Problem("/data/columns", str(error)))
    return problems + _tokenizer_problems(spec, roots)


def check_model(spec: JobSpec) -> list[Problem]:
    """The problems with a spec's model, found by building it on the meta device, which takes no memory."""
    try:
        model = build_model(spec.model)
    except ModelError as error:
        return [Problem("/model/config", str(error))]
    try:
        freeze(model, spec.model.freeze_module_prefix)
    except ModelError as error:
        return [Problem("/model/freeze_module_prefix", str(error))]
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
