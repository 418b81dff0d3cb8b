"""The reference of models: the table that `make models` computes."""

import json
import re
from pathlib import Path
from typing import Any

from tools.docs.markdown import code, table

_CHUNKED = "chunked loss"
FILE = Path(__file__).parents[2] / "docs/reference/models.json"


def page() -> str:
    """Return the Markdown of the page."""
    stored = json.loads(FILE.read_bytes())
    models: dict[str, dict[str, Any]] = stored["models"]
    trained = {family: row for family, row in models.items() if "results" in row}
    rejected = [
        (code(family), code(row["class"]), row["rejected"]) for family, row in models.items() if family not in trained
    ]
    cases = dict.fromkeys(case for row in trained.values() for case in row["results"] if not case.endswith(_CHUNKED))
    meshes = list(dict.fromkeys(_split(case)[0] for case in cases))
    head = ("model_type", "class", *meshes, "chunked loss", "remarks")
    return (
        "# Models\n\n"
        f"Each causal language model of transformers {stored['versions']['transformers']}. `make models` trains a "
        "small model of each family for one step on each mesh, and compares loss and gradients with a plain loop over "
        "transformers' own model: equal means within 1e-5. Differences are rounding in float32; `gemma3n_text` has the "
        "largest, because its sparse activations change by steps. `make test` repeats this for families that differ in "
        "kind and for a sample. Every other model is rejected by `POST /jobs` with the reason below.\n\n"
        "Of `qwen3_5` and `qwen3_5_moe`, whose folders have vision too, a run trains and exports the text, as "
        "`AutoModelForCausalLM` loads it; a warning names the rest.\n\n"
        f"{len(trained)} families are trained, {len(rejected)} are rejected.\n\n"
        "## Trained\n"
        "`=`: equal to transformers, with and without packing; `unpacked`: with `data.packing: false` only; "
        "`no`: rejected.\n\n"
        + table(head, [_row(family, row, meshes) for family, row in trained.items()])
        + "\n## Rejected\n\n"
        + table(("model_type", "class", "reason"), rejected)
    )


def _row(family: str, row: dict[str, Any], meshes: list[str]) -> list[str]:
    results: dict[str, Any] = row["results"]
    cells = [
        _mesh(
            {_split(case)[1]: one for case, one in results.items() if _split(case)[0] == mesh and _CHUNKED not in case}
        )
        for mesh in meshes
    ]
    chunked = _mesh({case: one for case, one in results.items() if case.endswith(_CHUNKED)})
    # The same reason for each size.
    reasons = (re.sub(r"ulysses_size=\d+", "ulysses_size", one) for one in results.values() if isinstance(one, str))
    remarks = "<br>".join(dict.fromkeys([*_settings(row), *reasons]))
    return [code(family), code(row["class"]), *cells, chunked, remarks]


def _split(case: str) -> tuple[str, str]:
    """Return the mesh of a case, and how its rows are used."""
    mesh, _, rows = case.partition(", ")
    return mesh, rows


def _mesh(found: dict[str, Any]) -> str:
    accepted = [rows for rows, one in found.items() if not isinstance(one, str)]
    if not accepted:
        return "no"
    return "=" if len(accepted) == len(found) else {"plain": "unpacked"}.get(accepted[0], accepted[0])


def _settings(row: dict[str, Any]) -> list[str]:
    needed = row.get("settings", {})
    config = [f"{name}: {json.dumps(value)}" for name, value in needed.get("config", {}).items()]
    layers = (
        [f"transformer_layer_cls_to_wrap: [{', '.join(needed['transformer_layer_cls_to_wrap'])}]"]
        if "transformer_layer_cls_to_wrap" in needed
        else []
    )
    return [f"needs {code(one)}" for one in (*config, *layers)]
