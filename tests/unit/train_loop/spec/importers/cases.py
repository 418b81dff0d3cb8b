"""Configurations of other tools for the tests of importers."""

from pathlib import Path
from typing import Any

import yaml

from train_loop.plan import MeshPlan, plan_mesh
from train_loop.spec import JobSpec, parse
from train_loop.spec.importers import Imported, Outcome, SourceFile, import_files
from train_loop.spec.importers.draft import leaves

FOLDER = Path("tests/fixtures/importers")
ENVIRONMENTS = b"""
max_actions_per_traj: 10
max_tokens_per_step: 128
custom_env:
  SimpleSokoban:
    env_type: sokoban
    max_steps: ${max_actions_per_traj}
    max_tokens_per_step: ${max_tokens_per_step}
"""
"""The part of ROLL's examples/config/traj_envs.yaml that tests need."""


def documents(name: str) -> dict[str, bytes]:
    """Return the documents of a fixture by the name of their source."""
    parts = (FOLDER / name).read_text().split("\n--- # ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].encode() for part in parts}


def beside(name: str) -> bytes | None:
    """Read a config that ROLL's examples name."""
    return ENVIRONMENTS if name == "../config/traj_envs" else None


def imported(
    text: str | bytes | dict[str, Any], *more: str | bytes | dict[str, Any], worker: str | None = None
) -> Imported:
    """Import one or several files."""
    files = [
        SourceFile(f"file-{number}", one.encode() if isinstance(one, str) else one, beside)
        for number, one in enumerate(yaml.safe_dump(one) if isinstance(one, dict) else one for one in (text, *more))
    ]
    return import_files(files, worker=worker, overrides={})


def job(found: Imported) -> JobSpec:
    """Return the spec of an import."""
    return parse(found.spec)


def mesh_of(spec: JobSpec) -> MeshPlan:
    """Return the mesh of a spec."""
    strategy = spec.strategy
    return plan_mesh(
        world=spec.scaling.world,
        fsdp_size=strategy.shards,
        ulysses_size=strategy.ulysses_size,
        tp_size=strategy.tp_size,
        ep_size=strategy.ep_size,
    )


def fates(found: Imported) -> dict[str, tuple[Outcome, str | None]]:
    """Return outcome and target of each field."""
    return {row.field: (row.outcome, row.target) for row in found.rows}


def marked(found: Imported) -> set[str]:
    """Return the fields and targets that change numbers."""
    return {row.field or str(row.target) for row in found.rows if row.changes_numbers}


def unreported(found: Imported, source: dict[str, Any]) -> set[str]:
    """Return the fields of a source without a row."""
    return {field for field, _ in leaves(source)} - {row.field for row in found.rows}
