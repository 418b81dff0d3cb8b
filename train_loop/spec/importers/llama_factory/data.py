"""The data of LLaMA-Factory's configurations, which name entries of `dataset_info.json`."""

from pydantic import JsonValue

from train_loop.spec.importers.draft import Draft
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag, names, number

_TOOL = "LLaMA-Factory"
_FILES = "names of dataset_info.json: write the URIs of their files below a storage root"


def read_data(draft: Draft) -> None:
    """Translate the rows, which of their tokens are trained, their length and packing."""
    is_text = draft.get("stage", "sft") == "pt"
    draft.leave("stage", "the loss of the next token")
    _sources(draft, "dataset", "data.train.path", "train")
    _columns(draft, is_text=is_text)
    packs = flag(draft.get("packing", is_text)) or flag(draft.get("neat_packing", False))
    _packing(draft, packs=packs)
    if is_text:
        draft.assume("", "data.on_long_rows", "split" if packs else "truncate", tool=_TOOL)
    else:
        reason = "LLaMA-Factory shortens prompt and answer of a long row in proportion; here its end is cut"
        draft.differ(reason, target="data.on_long_rows", written="truncate")
    _evaluation(draft)


def _sources(draft: Draft, field: str, target: str, name: str) -> None:
    given = names(draft.get(field))
    known = [str(one) for one in given] if isinstance(given, list) else []
    uris: list[JsonValue] = [f"file:///data/{one}.jsonl" for one in known] or [f"file:///data/{name}.jsonl"]
    draft.need(target, uris[0] if len(uris) == 1 else uris, _FILES, field=field if draft.has(field) else "")


def _columns(draft: Draft, *, is_text: bool) -> None:
    """Write the columns that rows need, by the tokens that are trained."""
    trained = next((name for name in ("train_on_prompt", "mask_history") if flag(draft.get(name, False))), "")
    if is_text:
        draft.need("data.columns", {"text": "text"}, "the column of dataset_info.json")
    elif trained == "train_on_prompt":
        reason = "all tokens are trained: write each conversation as text, rendered by the chat template"
        draft.need("data.columns", {"text": "text"}, reason, field=trained)
    elif trained:
        reason = "the last answer alone is trained: write the rendered conversation before it as prompt"
        draft.need("data.columns", {"prompt": "prompt", "response": "response"}, reason, field=trained)
    else:
        reason = "write rows of dataset_info.json as messages with role and content"
        draft.need("data.columns", {"messages": "messages"}, reason)
    for name in ("train_on_prompt", "mask_history"):
        draft.leave(name, "off")


def _packing(draft: Draft, *, packs: bool) -> None:
    field = next((name for name in ("neat_packing", "packing") if flag(draft.get(name, False))), "packing")
    neat = field == "neat_packing"
    reason = (
        "" if neat or not packs else "documents of a sample never attend to each other here; in LLaMA-Factory they do"
    )
    if draft.has(field):
        draft.write(field, "data.packing", packs, reason=reason, numbers=bool(reason))
    else:
        draft.assume(field, "data.packing", packs, tool=_TOOL)
        if reason:
            draft.differ(reason)
    for name in ("packing", "neat_packing"):
        draft.leave(name, f"{field} decides")


def _evaluation(draft: Draft) -> None:
    """Translate the rows to evaluate; TrainingArguments have the steps."""
    held, evaluates = number(draft.get("val_size")), str(draft.get("eval_strategy", "no")).lower() != "no"
    if draft.has("eval_dataset") and evaluates:
        _sources(draft, "eval_dataset", "data.eval.path", "eval")
    elif held and evaluates:
        reason = "LLaMA-Factory holds this part of the rows out: write them to another file"
        draft.need("data.eval.path", "file:///data/val.jsonl", reason, field="val_size")
    elif held:
        reason = "LLaMA-Factory holds these rows out and does not evaluate them: leave them out of the files"
        draft.note("val_size", Outcome.NOT_SUPPORTED, reason=reason, numbers=True)
    for name in ("eval_dataset", "val_size"):
        draft.leave(name, "nothing is evaluated")
