"""Random files of each tool become specs with the tool's own steps, batches, rates and trained parameters."""

import random
from types import ModuleType

import pytest

from tests.support.builders.searches import seeds
from tests.unit.train_loop.spec.importers.cases import imported, unreported
from tests.unit.train_loop.spec.importers.tools import axolotl, llama_factory, roll, torchtune, trainer, trl
from tests.unit.train_loop.spec.importers.tools.run import as_imported, differences
from train_loop.spec.importers import Outcome

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft and transformers read deprecated names
TOOLS = {
    "TrainingArguments": trainer,
    "TRL": trl,
    "ROLL, worker sft_train": roll,
    "axolotl": axolotl,
    "LLaMA-Factory": llama_factory,
    "torchtune": torchtune,
}


@pytest.mark.parametrize("name", TOOLS)
def test_random_file_becomes_the_run_of_its_tool(name: str) -> None:
    tool: ModuleType = TOOLS[name]
    for seed in range(seeds(20, more=300)):
        draws = random.Random(seed)
        file, processes = tool.draw(draws), draws.choice([1, 2, 4])
        expected = tool.expected(file, processes=processes)
        found = as_imported(file, [*expected.settings], processes=processes)
        assert differences(found, expected) == {}, (seed, file)


@pytest.mark.parametrize("name", TOOLS)
def test_random_file_has_a_line_for_each_field_and_none_is_unknown(name: str) -> None:
    tool: ModuleType = TOOLS[name]
    for seed in range(seeds(20, more=300)):
        file = tool.draw(random.Random(seed))
        found = imported(file)
        assert found.formats == (name,)
        assert unreported(found, file) == set(), seed
        assert [row.field for row in found.rows if row.outcome is Outcome.UNKNOWN] == [], seed
