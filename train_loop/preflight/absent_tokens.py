"""Added tokens of a tokenizer that the model lacks: an error if a chat template writes them, otherwise a warning."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from train_loop.data.prepare.encode import TextRules
from train_loop.data.text.chat import encode_whole, load_chat_templates
from train_loop.data.text.tokenizer import TextTokenizer
from train_loop.errors import DataError
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.spec import DataSpec, JobSpec

_SHOWN = 5
_QUESTION, _ANSWER = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}
_SYSTEM = {"role": "system", "content": "Be short."}
_CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL = {"type": "function", "function": {"name": "sum", "description": "", "parameters": {"type": "object"}}}
_PLAIN = [[_QUESTION, _ANSWER], [_SYSTEM, _QUESTION, _ANSWER, _QUESTION, _ANSWER]]
_WITH_TOOLS = [*_PLAIN, [_QUESTION, _CALLED, {"role": "tool", "content": "1"}, _ANSWER]]


def check_written_tokens(tokenizer: TextTokenizer, data: DataSpec, folder: Path, vocab: int) -> None:
    """Raise DataError if the chat template writes a token that a model with `vocab` tokens lacks into conversations."""
    columns = [data.columns_of(source) for source in (*data.sources, *data.eval_sources)]
    if not any(one.messages for one in columns) or not tokenizer.absent(vocab):
        return
    for ids in _rendered(tokenizer, TextRules.of(data, folder), with_tools=any(one.tools for one in columns)):
        if (reason := tokenizer.why_absent(ids, vocab)) is not None:
            raise DataError(
                f"the chat template cannot be used with the model: it makes text of a plain conversation, and {reason};"
                f" raise vocab_size to {tokenizer.vocab}, or give the model's own tokenizer"
            )


def _rendered(tokenizer: TextTokenizer, rules: TextRules, *, with_tools: bool) -> Iterator[list[int]]:
    """Yield the tokens of each conversation that the chat template accepts."""
    templates = load_chat_templates(rules.tokenizer, rules.chat_template)
    conversations = [(one, None) for one in _PLAIN] + [(one, [_TOOL]) for one in _WITH_TOOLS if with_tools]
    for messages, tools in conversations:
        with suppress(DataError):
            yield encode_whole(tokenizer, templates, messages, rules.system_prompt, tools)


def absent_tokens(spec: JobSpec) -> str | None:
    """Return a warning that names the added tokens that the model of a spec lacks; None without such tokens."""
    folder = tokenizer_folder(spec) if spec.data.reads_text else None
    if folder is None:
        return None
    vocab = model_shape(spec.model).vocab
    absent = TextRules.of_spec(spec, folder).load().absent(vocab)
    if not absent:
        return None
    names = [f"{text!r} (token {token})" for token, text in islice(absent.items(), _SHOWN)]
    more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
    return (
        f"the model has vocab_size={vocab}, without the tokenizer's {', '.join(names)}{more}; a row with such a token "
        "cannot be trained on"
    )
