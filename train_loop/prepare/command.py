"""Prepare a spec's data with Ray Data, for a run without the service."""

import argparse
import sys
from pathlib import Path

from train_loop.data.dataset import Dataset
from train_loop.data.prepare.cache import evaluation_spec
from train_loop.data.prepare.pipeline import prepare
from train_loop.errors import UserError
from train_loop.run_dir import default_cache
from train_loop.spec import JobSpec, SpecError, describe, parse_any_text


def main() -> None:
    """Prepare the data, report progress on standard error, and print the folders of the samples."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.prepare", description=__doc__)
    parser.add_argument("spec", type=Path, metavar="SPEC.yaml")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of prepared data [%(default)s]")
    arguments = parser.parse_args()
    try:
        spec = parse_any_text(arguments.spec.read_bytes()).run
        dataset = _prepare(spec, arguments.cache)
        other = evaluation_spec(spec, dataset)
        if other is not None:
            _prepare(other, arguments.cache)
    except UserError as error:
        sys.exit(str(error))
    except SpecError as error:
        sys.exit("\n".join(describe(one, str(arguments.spec)) for one in error.problems))


def _prepare(spec: JobSpec, cache: Path) -> Dataset:
    dataset = prepare(spec, cache, _print_event)
    full = f"{dataset.tokens:,} tokens, {dataset.utilisation:.1%} full"
    print(f"{dataset.samples} samples of {dataset.sample_tokens} ({full}):")
    for part in dataset.parts:
        print(f"  {cache / part.fingerprint if part.index else 'the original files'}: {part.samples} samples")
    return dataset


def _print_event(event: str, **fields: object) -> None:
    print(event, *(f"{name}={value}" for name, value in fields.items()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
