"""`trainshed init`, `schema` and `import`: a job spec to start from, the schema, and specs from other tools."""

import os
from collections.abc import Callable
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from train_loop.run_dir import local_path
from train_loop.spec import SCHEMA_ID, describe, dump_schema
from train_loop.spec.importers import SourceError, SourceFile, import_files
from trainshed.cli.connect import load_settings
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.options import AsJson, Overrides, read_file, read_overrides, write_file
from trainshed.cli.output.imported import show_report, spec_with_comments
from trainshed.cli.output.printing import show_json, show_next, show_note, show_text

_TEMPLATES = files("trainshed.cli") / "templates"
_SAMPLE_DATA = "instructions.jsonl"
_SAMPLE_FIELD = "SAMPLE_DATA"
"""The text in a template that stands for the URI of the sample data."""
_SCHEMA = "job.schema.json"


class Template(StrEnum):
    """A spec that `trainshed init` writes."""

    PRETRAIN = "pretrain"
    SFT = "sft"
    LONG_CONTEXT = "long-context"
    LORA = "lora"


class Init(BaseModel):
    """Result of `init`: the files that it wrote."""

    template: Template
    spec: str
    json_schema: str
    data: str | None
    """Sample data of the spec; None if the spec reads Python's standard library."""


def init(
    file: Annotated[Path, typer.Argument(help="path of the new spec")] = Path("job.yaml"),
    template: Annotated[Template, typer.Option("--from", help="template of the spec")] = Template.PRETRAIN,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a commented job spec that runs as it is, and its JSON schema for editors."""
    schema = file.with_name(_SCHEMA)
    if not force:
        _check_new(file)
        _check_schema(schema)
    text = (_TEMPLATES / f"{template}.yaml").read_text(encoding="utf-8")
    data = _write_sample_data() if _SAMPLE_FIELD in text else None
    write_file(file, text.replace(_SAMPLE_FIELD, data.as_uri() if data else "").encode())
    write_file(schema, dump_schema().encode())
    done = Init(template=template, spec=str(file), json_schema=str(schema), data=str(data) if data else None)
    if as_json:
        show_json(done)
        return
    show_text(done.spec)
    show_note(f"wrote {schema}, the schema that editors check it with")
    if data is not None:
        show_note(f"wrote {data}, its sample data")
    show_next(f"plan {file}")


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write instead of standard output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the JSON schema of the job spec. Needs no service."""
    if output is None:
        print(dump_schema(), end="")
    else:
        write_file(output, dump_schema().encode())
        if not as_json:
            show_text(str(output))
    if not as_json:
        show_next("init")


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="configuration of another tool, such as TRL, axolotl, LLaMA-Factory or ROLL; of several files, later "
            "ones win; - reads standard input",
            allow_dash=True,
        ),
    ],
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="worker of ROLL's file [default: the only one with fsdp2_train]")
    ] = None,
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write instead of standard output")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a configuration of another tool into a job spec. Needs no service.

    The report has a line for each field: what became of it, and why. ≠ marks what changes numbers.
    """
    sources = [_source(file) for file in files]
    try:
        found = import_files(sources, worker=worker, overrides=read_overrides(overrides or ()))
    except SourceError as error:
        fail("the file cannot be imported:", [describe(one, error.file) for one in error.problems], code=Exit.USAGE)
    text = spec_with_comments(found, [source.name for source in sources])
    if output is not None:
        write_file(output, text.encode())
    if as_json:
        show_json(found)
        return
    if output is None:
        print(text, end="")
    show_report(found.rows, on_stdout=output is not None)
    paths = [row.target for row in found.needed if row.target is not None and row.target.endswith("path")]
    show_next(" ".join([f"plan {output or 'FILE'}", *(f"--set {path}=…" for path in paths)]))


def _source(file: Path) -> SourceFile:
    name = "<stdin>" if str(file) == "-" else str(file)
    return SourceFile(name, read_file(file, "configuration", regular=True), _reader(file))


def _reader(file: Path) -> Callable[[str], bytes | None]:
    """Return a function that reads the configs which Hydra finds below the folder of a file."""

    def read(name: str) -> bytes | None:
        config = file.parent / f"{name}.yaml"
        if str(file) == "-" or not os.path.lexists(config):
            return None
        # A downloaded folder may have links to any file.
        if not os.path.realpath(config).startswith(os.path.join(os.path.realpath(file.parent), "")):
            remedy = "import the file from a folder above both, or write the fields of that config into it"
            fail(f"defaults of {file} name {config}, which lies outside of its folder; {remedy}", code=Exit.USAGE)
        return read_file(config, "configuration", regular=True)

    return read


def _check_new(file: Path) -> None:
    if os.path.lexists(file):
        fail(f"{file} already exists; name a new file, or add --force to replace it", code=Exit.USAGE)


def _check_schema(file: Path) -> None:
    """Exit with code 2 if a file with the name of the schema exists that is not a schema of job specs."""
    try:
        ours = SCHEMA_ID in file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        ours = False
    if not ours:
        _check_new(file)


def _write_sample_data() -> Path:
    """Write the sample data to the storage root of the home, which every job may read, and return its path."""
    settings = load_settings()
    file = local_path(settings.own_root) / "samples" / _SAMPLE_DATA
    try:
        settings.make_home()
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{file.parent}: {error.strerror}; set TRAINSHED_HOME to a writable folder", code=Exit.USAGE)
    write_file(file, (_TEMPLATES / _SAMPLE_DATA).read_bytes())
    return file
