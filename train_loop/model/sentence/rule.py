"""The rule by which a spec's model embeds texts: that of the spec, or of the folder of the model or its adapters."""

from collections.abc import Iterator
from typing import NamedTuple

from train_loop.model.folder import adapter_folder, model_folder
from train_loop.model.sentence.folder import MODULES, SentenceRules, read_sentence_rules
from train_loop.spec import EmbeddingSpec, JobSpec, ModelSpec, Problem
from train_loop.spec.heads import Pooling


class EmbeddingRule(NamedTuple):
    """The rule by which the states of a text's tokens become a vector."""

    pooling: Pooling
    normalize: bool


def embedding_rule(model: ModelSpec) -> EmbeddingRule | None:
    """Return the rule of a spec's model; None for models with another head.

    What the spec leaves out is as the folder has it, or else the normalised state of the last token. Raises ModelError
    if the folder embeds in a way that is not supported.
    """
    given = _given(model)
    if given is None:
        return None
    found = None if _is_whole(given) else folder_rules(model)
    rule = EmbeddingRule("last_token", normalize=True)
    if found is not None:
        rule = EmbeddingRule(found.pooling, found.normalize)
    return EmbeddingRule(given.pooling or rule.pooling, rule.normalize if given.normalize is None else given.normalize)


def folder_rules(model: ModelSpec) -> SentenceRules | None:
    """Return the rules that the folder of the adapters states, or else that of the model; None without any."""
    folders = [folder for folder in (adapter_folder(model), model_folder(model)) if folder is not None]
    return next((found for folder in folders if (found := read_sentence_rules(folder)) is not None), None)


def stated_rules(model: ModelSpec) -> SentenceRules | None:
    """Return the rules of a folder to hold a spec with an embedding head against; None without any.

    The weights of a job follow the rule that the job was trained with. Raises ModelError as `embedding_rule`.
    """
    given = _given(model)
    if given is None or model.is_of_job or (_is_whole(given) and not _has_modules(model)):
        return None
    return folder_rules(model)


def rule_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield what contradicts the rules of the folder whose model a spec embeds texts with. Raises ModelError."""
    given, found = _given(spec.model), stated_rules(spec.model)
    if given is None or found is None:
        return
    for name, value, of_folder in (
        ("pooling", given.pooling, found.pooling),
        ("normalize", given.normalize, found.normalize),
    ):
        if value not in (None, of_folder):
            yield Problem(
                f"/model/head/embedding/{name}",
                f"{name}={_shown(value)} contradicts {found.folder}, whose {MODULES} has {_shown(of_folder)}; remove "
                f"{name} from model.head.embedding",
            )
    length = spec.data.sequence_length
    if found.longest is not None and length > found.longest and spec.data.reads_text:
        yield Problem(
            "/data/sequence_length",
            f"sequence_length={length} is more than the {found.longest} tokens to which {found.folder} truncates "
            f"texts (max_seq_length, or model_max_length of its tokenizer); choose at most {found.longest}",
        )


def prompt_note(model: ModelSpec) -> str | None:
    """Return a warning if the folder has prompts, which are not put before texts; None without any."""
    found = stated_rules(model)
    if found is None or not found.prompts:
        return None
    return (
        f"{found.folder} has prompts ({', '.join(found.prompts):.200}) for some texts, and none is put before the "
        "rows; write them into the rows that need them"
    )


def _given(model: ModelSpec) -> EmbeddingSpec | None:
    return None if model.label_head is None else model.label_head.embedding


def _is_whole(given: EmbeddingSpec) -> bool:
    return given.pooling is not None and given.normalize is not None


def _has_modules(model: ModelSpec) -> bool:
    folders = (adapter_folder(model), model_folder(model))
    return any(folder is not None and (folder / MODULES).is_file() for folder in folders)


def _shown(value: str | bool | None) -> str:
    return str(value).lower()
