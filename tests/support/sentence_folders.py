"""Folders of sentence-transformers in the layouts of its versions, around any model."""

import json
from pathlib import Path
from typing import Any

_NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
_OLD_POOLINGS = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}


def write_sentence_files(
    folder: Path, pooling: str | list[str], *more: str, new: bool = False, **files: dict[str, Any]
) -> Path:
    """Write modules.json and what it names; `more` are modules after the pooling.

    `files` has the content of `sentence_bert_config` and `config_sentence_transformers`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kinds = ["Transformer", "Pooling", *more]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": _NEW[kind] if new and kind in _NEW else f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for number, kind in enumerate(kinds[1:], 1):
        (folder / f"{number}_{kind}").mkdir(exist_ok=True)
    poolings = [pooling] if isinstance(pooling, str) else pooling
    old = {f"pooling_mode_{name}": mode in poolings for mode, name in _OLD_POOLINGS.items()}
    config = {"embedding_dimension": 32, "pooling_mode": pooling} if new else {"word_embedding_dimension": 32} | old
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
