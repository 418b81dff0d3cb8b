"""A rendered conversation and its turns → tokens and labels."""

from bisect import bisect_left
from typing import NamedTuple

from train_loop.data.dataset import IGNORE
from train_loop.data.text.tokenizer import TextTokenizer
from train_loop.data.text.turn import Turn


class ChatTokens(NamedTuple):
    """The tokens of a conversation, which end with EOS."""

    ids: list[int]
    labels: list[int]
    """All IGNORE if nothing is trained."""
    ends: frozenset[int]
    """Tokens that end a trained turn."""


def encode_turns(tokenizer: TextTokenizer, text: str, turns: list[Turn], *, ends_with_answer: bool) -> ChatTokens:
    """Return the tokens of a conversation's text, with BOS as `data.add_bos` says, and EOS."""
    return with_bos(tokenizer, _tokens(tokenizer, text, turns, ends_with_answer=ends_with_answer))


def _tokens(tokenizer: TextTokenizer, text: str, turns: list[Turn], *, ends_with_answer: bool) -> ChatTokens:
    """Return the tokens of a text, with EOS; a token is trained if any of its text is."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    starts = [start for start, _ in offsets]
    trained = bytearray(len(text))
    for start, _, stop in turns:
        trained[start:stop] = b"\1" * (stop - start)
    labels = [token if 1 in trained[start:stop] else IGNORE for token, (start, stop) in zip(ids, offsets, strict=True)]
    ends = {ids[bisect_left(starts, turn.stop) - 1] for turn in turns if turn.end < turn.stop}
    length = len(text.rstrip())
    if ids[bisect_left(starts, length) - 1 :][:1] == [tokenizer.eos]:
        return ChatTokens(ids, labels, frozenset(ends))
    # The model learns to write EOS after its own last message, unless another end token ends that message. If text
    # that the model does not write comes between them, it would never get there.
    reached = max((turn.stop for turn in turns), default=0) >= length
    last = next((label for label in reversed(labels) if label != IGNORE), IGNORE)
    is_ended = bool(turns) and turns[-1].end < turns[-1].stop and last in tokenizer.end_tokens
    if not (ends_with_answer and reached) or is_ended:
        return ChatTokens([*ids, tokenizer.eos], [*labels, IGNORE], frozenset(ends))
    return ChatTokens([*ids, tokenizer.eos], [*labels, tokenizer.eos], frozenset(ends | {tokenizer.eos}))


def up_to_eos(tokenizer: TextTokenizer, text: str, turns: list[Turn]) -> list[Turn]:
    """Return turns that stop after the first EOS of their ends, as the model writes nothing after it.

    Some templates write the generation prompt after each conversation.
    """
    eos = str(tokenizer.variables["eos_token"])
    places = (text.find(eos, turn.end, turn.stop) for turn in turns)
    return [
        turn if place < 0 else turn._replace(stop=place + len(eos)) for turn, place in zip(turns, places, strict=True)
    ]


def with_bos(tokenizer: TextTokenizer, tokens: ChatTokens) -> ChatTokens:
    """Apply `data.add_bos` to a conversation, whose BOS the chat template writes."""
    ids, labels, ends = tokens
    begins = tokenizer.bos is not None and ids[:1] == [tokenizer.bos]
    if tokenizer.add_bos is True and not begins:
        assert tokenizer.bos is not None, "checked by adding_bos"
        return ChatTokens([tokenizer.bos, *ids], [IGNORE, *labels], ends)
    return ChatTokens(ids[1:], labels[1:], ends) if tokenizer.add_bos is False and begins else tokens
