"""The check that a tokenizer reads texts in lower case, if the folder of the model that embeds them says so."""

from train_loop.data.text.tokenizer import TextTokenizer
from train_loop.errors import DataError
from train_loop.model.sentence.rule import stated_rules
from train_loop.spec import JobSpec

_PROBES = ("A", "Two Words")


def check_letter_case(spec: JobSpec, tokenizer: TextTokenizer) -> None:
    """Raise DataError if the folder of a spec's model embeds texts in lower case, and the tokenizer keeps capitals."""
    rules = stated_rules(spec.model)
    if rules is None or not rules.lower_case:
        return
    if any(tokenizer.encode_with_offsets(one) != tokenizer.encode_with_offsets(one.lower()) for one in _PROBES):
        raise DataError(
            f"{rules.folder} embeds texts in lower case (do_lower_case), and its tokenizer keeps capitals; write the "
            "rows in lower case and set do_lower_case: false in a copy of the folder, or name another model"
        )
