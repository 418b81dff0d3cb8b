"""The tokens with which chat templates end an answer."""

from collections.abc import Iterator
from contextlib import suppress

from train_loop.data.text.chat import load_chat_templates
from train_loop.data.text.chat_template import REFUSED, ChatTemplate
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.spec import DataSpec

_ANSWER = "Yes, I see."


def ends_of_answers(data: DataSpec, tokenizer: str) -> list[int]:
    """Return the tokens with which the chat templates of a spec's data end an answer; none without conversations.

    They often differ from the tokenizer's EOS, and a model that was trained on chats ends its answers with them.
    """
    if not any(data.columns_of(source).messages for source in data.sources):
        return []
    templates = load_chat_templates(tokenizer, data.chat_template).by_name.values()
    loaded = load_tokenizer(tokenizer, needs_eos=False).tokenizer
    found = [loaded.token_to_id(end) for template in templates for end in _end(template)]
    return list(dict.fromkeys(token for token in found if token is not None))


def _end(template: ChatTemplate) -> Iterator[str]:
    with suppress(*REFUSED):  # it needs another conversation
        text = template.text([{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": _ANSWER}])
        if end := template.marker.match(text.rpartition(_ANSWER)[2]):
            yield end[1]
