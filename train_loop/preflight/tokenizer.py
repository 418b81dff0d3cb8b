"""Checks of a spec's tokenizer and chat template, and added tokens that the model lacks."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from train_loop.data.prepare.encode import TextRules
from train_loop.data.prepare.sources import check_plain
from train_loop.data.text.chat import check_chat_template, encode_whole, load_chat_templates
from train_loop.data.text.letter_case import check_letter_case
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import DataError
from train_loop.model.folder import model_shape, tokenizer_folder
from train_loop.plan import ModelShape
from train_loop.preflight.parent_checkpoint import has_its_tokenizer
from train_loop.preflight.process.fork_server import MISTAKES, message_of, set_pointer
from train_loop.run_dir import Parent, ReadPolicy
from train_loop.spec import DataSpec, JobSpec, Problem

_SHOWN = 5
_QUESTION, _ANSWER = {"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}
_SYSTEM = {"role": "system", "content": "Be short."}
_CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL = {"type": "function", "function": {"name": "sum", "description": "", "parameters": {"type": "object"}}}
_PLAIN = [[_QUESTION, _ANSWER], [_SYSTEM, _QUESTION, _ANSWER, _QUESTION, _ANSWER]]
_WITH_TOOLS = [*_PLAIN, [_QUESTION, _CALLED, {"role": "tool", "content": "1"}, _ANSWER]]


def tokenizer_problems(spec: JobSpec, policy: ReadPolicy, shape: ModelShape, parent: Parent | None) -> list[Problem]:
    """Return the problems of the tokenizer: that it is absent, or does not fit the model, the data or its template."""
    if not spec.data.reads_text and spec.model.tokenizer is None:
        return []
    set_pointer("/model/tokenizer")
    try:
        if spec.model.tokenizer is not None and not has_its_tokenizer(spec.model, parent, policy):
            check_plain(spec.model.tokenizer, policy)
        folder, data = tokenizer_folder(spec), spec.data
        if folder is None and data.add_bos is True:
            return [
                Problem(
                    "/data/add_bos", "a tokenizer that is trained on the data has no BOS; name one in model.tokenizer"
                )
            ]
        if folder is not None:
            tokenizer = load_tokenizer(str(folder), needs_eos=spec.model.ends_text)
            tokenizer.check_fits(shape.vocab)
            check_letter_case(spec, tokenizer)
            if any(data.columns_of(source).messages for source in (*data.sources, *data.eval_sources)):
                problems = _template_problems(data, policy, str(folder))
                if problems:
                    return problems
            _check_written_tokens(tokenizer, data, folder, shape.vocab)
            return _bos_problems(tokenizer, data)
    except MISTAKES as error:
        return [Problem("/model/tokenizer", message_of(error))]
    return []


def _bos_problems(tokenizer: TextTokenizer, data: DataSpec) -> list[Problem]:
    try:
        tokenizer.adding_bos(data.add_bos)
    except DataError as error:
        return [Problem("/data/add_bos", str(error))]
    return []


def _template_problems(data: DataSpec, policy: ReadPolicy, folder: str) -> list[Problem]:
    """Return the problems of the chat template, at the field that names it."""
    pointer = "/model/tokenizer" if data.chat_template is None else "/data/chat_template"
    set_pointer(pointer)
    try:
        if data.template_file is not None:
            check_plain(data.template_file, policy, kind="file")
        check_chat_template(folder, data.chat_template)
    except MISTAKES as error:
        return [Problem(pointer, message_of(error))]
    set_pointer("/model/tokenizer")
    return []


def _check_written_tokens(tokenizer: TextTokenizer, data: DataSpec, folder: Path, vocab: int) -> None:
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
