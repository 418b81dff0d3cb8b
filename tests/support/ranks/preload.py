"""Modules that ranks of tests import before they are forked; the garbage collector never scans them."""

from importlib import import_module

import train_loop.checkpoint.restore
import train_loop.run  # noqa: F401
from train_loop.system.gc import keep_what_is_there

# What a run imports when it first needs it.
for module in (
    "pandas",
    "pyarrow.compute",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
):
    import_module(module)
keep_what_is_there()
