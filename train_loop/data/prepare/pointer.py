"""The pointer from a run to its samples: they stay the same for the whole run, whatever the cache loses."""

from pathlib import Path

from pydantic import ValidationError

from train_loop.data.dataset import Dataset
from train_loop.data.prepare.cache import fingerprint, is_whole, library_versions, list_source
from train_loop.errors import DataError
from train_loop.run_dir import RunDir, read_whole, write_durably
from train_loop.spec import JobSpec


def pinned_dataset(spec: JobSpec, pointer: Path) -> Dataset | None:
    """Return the dataset that a run's pointer names; None without a pointer, or if the cache has lost the samples.

    Raises DataError if the pointer is invalid, or if files that are read without preparation have changed since.
    """
    try:
        dataset = Dataset.model_validate_json(read_whole(pointer, below=pointer.parent.parent))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{pointer} was written by another version of Trainshed; start a new run") from error
    if not all(is_whole(part) for part in dataset.parts if part.index):
        return None
    for written, part in zip(spec.data.sources, dataset.parts, strict=True):
        # Only sources without prepared samples still need their files.
        if part.index is None and fingerprint(spec, list_source(spec, written), None) != part.fingerprint:
            raise DataError(
                f"the files of {', '.join(written.paths)} have changed since the run began; restore them, or start a "
                "new run"
            )
    return dataset


def as_in_parent(dataset: Dataset, run_dir: RunDir) -> Dataset:
    """Return a run's dataset with the fingerprint of its parent's if both have the same samples.

    The run then continues at the parent's position, whatever versions have prepared the samples again.
    """
    parent = run_dir.parent()
    if parent is None:
        return dataset
    try:
        other = RunDir.at(parent.run_dir)
        before = Dataset.model_validate_json(read_whole(other.data, below=other.root))
    except (FileNotFoundError, ValidationError):
        return dataset
    return dataset.model_copy(update={"fingerprint": before.fingerprint}) if dataset.has_samples_of(before) else dataset


def pin(dataset: Dataset, pointer: Path) -> Dataset:
    """Write the pointer from a run to its dataset, and return it. Raises DataError as `as_begun`."""
    dataset = as_begun(dataset, pointer)
    write_durably(pointer, dataset.model_dump_json(indent=2), below=pointer.parent.parent)
    return dataset


def as_begun(dataset: Dataset, pointer: Path) -> Dataset:
    """Return a dataset with the fingerprint in a run's pointer, which also determines the order of samples.

    Raises DataError if the run began with other samples.
    """
    try:
        began = Dataset.model_validate_json(read_whole(pointer, below=pointer.parent.parent))
    except FileNotFoundError:
        return dataset
    if dataset.has_samples_of(began):
        return dataset.model_copy(update={"fingerprint": began.fingerprint})
    if began.fingerprint == dataset.fingerprint:
        cause = "preparing the same files again gave other samples, for example if a chat template writes the date"
        raise DataError(f"the cache has lost the samples that the run began with, and {cause}; start a new run")
    raise DataError(
        f"the cache has lost the samples that the run began with ({began.fingerprint[:12]}), and its sources, the "
        f"rules of preparation or the versions of its packages{_changed_libraries(began)} have changed since (now "
        f"{dataset.fingerprint[:12]}); restore the files or the versions, or start a new run"
    )


def _changed_libraries(began: Dataset) -> str:
    """Return the packages whose versions differ from those of a run's beginning, in parentheses; '' if unknown."""
    then = {name: number for part in began.parts for name, number in part.libraries.items()}
    changed = [
        f"{name} {then[name]}, now {now}" for name, now in library_versions().items() if now != then.get(name, now)
    ]
    return f" ({'; '.join(changed)})" if changed else ""
