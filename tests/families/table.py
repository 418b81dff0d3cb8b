"""`python -m tests.families.table`: checks every family of causal language models, and writes the table of results.

Each family is rejected by the checks of `POST /jobs`, or trained for a step on each mesh and compared
with transformers.
"""

import argparse
import json
import queue
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.families.parity import CASES, TOLERANCE, Case, Settings, advised, differences, raw_job
from tests.support.builders.specs import may_read
from tests.support.families.families import FAMILIES, small
from tests.support.ranks.ranks import ranks_of_any_number
from train_loop.errors import ModelError
from train_loop.model.families.causal.family import CAUSAL
from train_loop.parallel.layers import tiled_mlps
from train_loop.preflight.model import check_model
from train_loop.spec import ModelSpec, parse

FILE = Path(__file__).parents[2] / "docs/reference/models.json"
CallRanks = Callable[..., Any]


def entry(family: str, call_ranks: CallRanks, cases: Iterable[str] = CASES) -> dict[str, Any]:
    """Return the row of a family: the reason why it is rejected, or the result of each case.

    A result is the largest relative difference from transformers, or the reason why the case is rejected. Anything else
    is a fault: text that begins with `FAULT`.
    """
    head: dict[str, Any] = {"class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]}
    settings = settings_of(family)
    reason = refusal(family, "one rank, plain", settings)
    if reason is not None:
        return head | {"rejected": reason}
    results: dict[str, Any] = {name: refusal(family, name, settings) for name in cases}
    for world in sorted({case.world for case in CASES.values()}):
        accepted = [name for name, why in results.items() if why is None and CASES[name].world == world]
        if accepted:
            results |= trained(family, accepted, settings, call_ranks)
    needed = {"config": dict(settings.config), "transformer_layer_cls_to_wrap": [*settings.layers]}
    needed = {name: value for name, value in needed.items() if value}
    return head | ({"settings": needed} if needed else {}) | {"results": results}


@cache
def settings_of(family: str) -> Settings:
    """Return the settings after a user has followed the advice of each reason."""
    settings = Settings()
    while (reason := refusal(family, "one rank, plain", settings)) is not None:
        better = advised(family, reason, settings)
        if better == settings:
            break
        settings = better
    return settings


def refusal(family: str, name: str, settings: Settings) -> str | None:
    """Return the reason why `POST /jobs` rejects a case; None if it accepts it."""
    _, problems = check_model(parse(raw_job(family, CASES[name], settings)), may_read())
    return problems[0].message if problems else None


def trained(family: str, names: list[str], settings: Settings, call_ranks: CallRanks) -> dict[str, Any]:
    """Return the results of cases on one number of ranks."""
    try:
        found = call_ranks(CASES[names[0]].world, differences, family, names, settings)
    except (AssertionError, queue.Empty) as error:
        last = str(error).strip().splitlines()[-1:] or ["no answer"]
        return dict.fromkeys(names, f"FAULT: {last[0]}")
    return {name: one if one < TOLERANCE else f"FAULT: differs by {one:.1e}" for name, one in found.items()}


def kind(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without its numbers, which differ by machine: equal, or a reason."""
    results = {
        name: "equal" if isinstance(result, float) else result for name, result in row.get("results", {}).items()
    }
    return row | ({"results": results} if results else {})


def faults(row: dict[str, Any]) -> list[str]:
    """Return the faults of a row: steps that fail, hang or differ from transformers."""
    return [f"{name}: {one}" for name, one in row.get("results", {}).items() if str(one).startswith("FAULT")]


def read() -> dict[str, Any]:
    """Return the stored rows by family."""
    models: dict[str, Any] = json.loads(FILE.read_bytes())["models"]
    return models


def accepted(family: str, cases: Iterable[Case]) -> list[Case]:
    """Return the cases as a mixture of experts accepts them: without packing, Ulysses or tiles if it has none."""
    results = read()[family]["results"]
    packs, splits = (not isinstance(results[f"{name}, packed"], str) for name in ("one rank", "Ulysses 2"))
    tiles = ("strategy", "apply_tiled_mlp", True)
    left = [case for case in cases if case.ulysses_size == 1 or splits]
    if not _has_dense_mlps(family):
        left = [replace(case, others=tuple(one for one in case.others if one != tiles)) for case in left]
    return [replace(case, packed=case.packed and packs) for case in left]


def _has_dense_mlps(family: str) -> bool:
    anatomy = CAUSAL.build(ModelSpec(config=small(family)))
    try:
        return bool(tiled_mlps(anatomy, anatomy.layers))
    except ModelError:
        return False


def write(rows: dict[str, Any]) -> None:
    """Write rows into the stored table, whose other rows stay."""
    known = read() if FILE.exists() else {}
    models = {family: row for family, row in sorted((known | rows).items()) if family in FAMILIES}
    rounded = json.loads(json.dumps(models), parse_float=lambda number: float(f"{float(number):.0e}"))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    FILE.write_text(json.dumps({"versions": versions, "models": rounded}, indent=1) + "\n")


def main() -> None:
    """Check families and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES, metavar="FAMILY", help="default: all")
    parser.add_argument("--part", default="1/1", help="the part of the families to check, such as 2/5")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    rows, wrong = {}, []
    with ranks_of_any_number(4) as call_ranks:
        for family in arguments.families[part - 1 :: parts]:
            start = time.monotonic()
            rows[family] = entry(family, call_ranks)
            sys.stdout.write(f"{family} ({time.monotonic() - start:.1f} s): {rows[family]}\n")
            sys.stdout.flush()
            wrong += [f"{family}: {one}" for one in faults(rows[family])]
            write({family: rows[family]})
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
