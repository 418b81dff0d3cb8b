"""`python -m train_loop.prepare SPEC.yaml`: prepare a spec's data with Ray Data, for a run without the service."""

import argparse
from pathlib import Path

from train_loop.data.cache import default_cache, evaluation_spec
from train_loop.data.dataset import Dataset
from train_loop.data.prepare import prepare
from train_loop.spec import JobSpec, parse_text


def main() -> None:
    """Prepare, and print where the samples are."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.prepare", description=__doc__)
    parser.add_argument("spec", type=Path, metavar="SPEC.yaml")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of prepared data (%(default)s)")
    arguments = parser.parse_args()
    spec = parse_text(arguments.spec.read_bytes())
    dataset = _prepare(spec, arguments.cache)
    other = evaluation_spec(spec, dataset)
    if other is not None:
        _prepare(other, arguments.cache)


def _prepare(spec: JobSpec, cache: Path) -> Dataset:
    dataset = prepare(spec, cache, report=lambda *_, **__: None)
    print(f"{dataset.samples} samples of {dataset.sequence_length} tokens: {cache / dataset.fingerprint}")
    return dataset


if __name__ == "__main__":
    main()
