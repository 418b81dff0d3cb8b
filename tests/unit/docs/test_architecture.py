"""The architecture page lists the folders that exist, and no folder has too many modules."""

import re
from collections import Counter
from pathlib import Path

PAGE = Path("docs/explanation/architecture.md")
PACKAGES = ("trainshed", "service", "train_loop")
# A folder per feature below these; the features are the same in every layer.
FEATURES = {Path("service/use_cases"), Path("service/domain")}


def listed_folders() -> set[Path]:
    table = PAGE.read_text().partition("## Folders\n")[2].partition("\n## ")[0]
    return {Path(name) for name in re.findall(r"^\| `([a-z_/]+)/` \|", table, re.MULTILINE)}


def existing_packages() -> set[Path]:
    every = {file.parent for name in PACKAGES for file in Path(name).rglob("__init__.py")}
    return {one for one in every if not FEATURES & set(one.parents) and "migrations" not in one.parts}


def test_page_lists_every_package() -> None:
    assert existing_packages() - listed_folders() == set()


def test_listed_folders_exist() -> None:
    assert [one for one in listed_folders() if not one.is_dir()] == []


def test_page_of_one_step_names_files_and_functions_that_exist() -> None:
    text = Path("docs/explanation/one-step.md").read_text()
    names = re.findall(r"`([a-z_/.]+|[A-Z]\w+)`", text)
    files = [name for name in names if name.startswith("train_loop/")]
    code = "".join(file.read_text() for file in Path("train_loop").rglob("*.py"))
    assert len(files) > 15
    assert [file for file in files if not Path(file).exists()] == []
    assert [name for name in set(names) - set(files) if not re.search(rf"\b{name}\b", code)] == []


def test_no_folder_has_more_modules_than_a_reader_can_survey() -> None:
    found = Counter(file.parent for name in (*PACKAGES, "tests", "benchmarks") for file in Path(name).rglob("*.py"))
    most = {folder: 10 if str(folder) in PACKAGES else 15 for folder in found if folder.name != "versions"}
    counts = {folder: found[folder] - folder.joinpath("__init__.py").exists() for folder in most}
    assert {folder: count for folder, count in counts.items() if count > most[folder]} == {}
