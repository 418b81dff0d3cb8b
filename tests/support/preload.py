"""What ranks of tests have imported before they are forked, and never look through for garbage."""

import pandas
import pyarrow.compute
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3

import train_loop.checkpoint.load
import train_loop.run  # noqa: F401
from train_loop.garbage import keep_what_is_there

keep_what_is_there()
