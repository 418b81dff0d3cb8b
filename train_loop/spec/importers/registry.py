"""The tools whose configurations are known, and the choice among them."""

from train_loop.spec.importers.axolotl import config as axolotl
from train_loop.spec.importers.hugging_face import accelerate, transformers, trl
from train_loop.spec.importers.llama_factory import arguments as llama_factory
from train_loop.spec.importers.recognise import Convert, Source, Tool, marked_tools, recognise
from train_loop.spec.importers.references import compose
from train_loop.spec.importers.refused import REFUSED
from train_loop.spec.importers.roll import pipeline as roll
from train_loop.spec.importers.torchtune import recipe as torchtune
from train_loop.spec.job import JobSpec

_OURS = Tool(
    "Trainshed",
    marks=("scaling.num_workers", "scaling.resources_per_worker"),
    alone=tuple(JobSpec.model_fields),
    refusal="which needs no import; submit it: trainshed submit FILE",
)
TOOLS: tuple[Tool, ...] = (
    *(roll.TOOL, accelerate.TOOL, transformers.TOOL, transformers.DISTRIBUTED_TOOL),
    *(trl.TOOL, trl.REWARD_TOOL, trl.OTHERS),
    *(axolotl.TOOL, llama_factory.TOOL, torchtune.TOOL),
    *REFUSED,
    _OURS,
)
"""All tools. An importer declares the fields that only its tool has, and is added here."""


def importer_of(source: Source) -> tuple[str, Convert]:
    """Return the name and the importer of a file's tool. Raises SpecError if it is unclear or refused."""
    data = source.data
    if "defaults" in data and not marked_tools(data, TOOLS):
        # The configs that Hydra adds may tell the tool.
        data = compose(data, source.read)
    return recognise(data, TOOLS)
