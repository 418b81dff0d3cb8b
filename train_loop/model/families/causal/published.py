"""Folders in the layout that transformers publishes: experts stored one by one, and configs."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from train_loop.errors import DataError, ModelError
from train_loop.model.families.causal.build import Model, config_of, stored_rules
from train_loop.model.families.causal.heads import pools
from train_loop.model.families.family import ExportFacts, Join, Rows, SpecialTokens, Split, Unchanged
from train_loop.run_dir import write_durably
from train_loop.system.input_files import read_input

Shape = tuple[int, ...]


def own_names(model: Model, stored: Iterable[str]) -> tuple[dict[str, str], dict[str, Join]]:
    """Return a model's names of stored tensors, and its tensors that are made of several, by transformers' rules."""
    rules = stored_rules(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    # A rule with several targets splits a tensor of an older layout, which no folder of a supported model has.
    joining = [rule for rule in rules if isinstance(rule, WeightConverter) and len(rule.target_patterns) == 1]
    by_pattern = {pattern: rule for rule in joining for pattern in rule.source_patterns}
    own, known = dict[str, str](), model.state_dict()
    parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(stored, key=dot_natural_key):
        own[name], pattern = rename_source_key(name, renamings, joining, model.base_model_prefix, known)
        if pattern is not None:
            parts[own[name]][pattern].append(name)
    return own, {
        target: _Joined(
            tuple(_counted(names, pattern, known.get(target)) for pattern, names in by.items()),
            tuple(by),
            by_pattern[next(iter(by))],
            model,
            target,
        )
        for target, by in parts.items()
    }


def _counted(names: Sequence[str], pattern: str, target: Tensor | None) -> tuple[str, ...]:
    """Return the names of a pattern with `*` for each row of a tensor, in order, whether they are stored or not."""
    _, star, after = pattern.rpartition("*")
    if not star or target is None:
        return tuple(names)
    numbered, *last = names[0].rsplit(".", after.count("."))
    first, _, _ = numbered.rpartition(".")
    return tuple(".".join([first, str(row), *last]) for row in range(len(target)))


@dataclass(frozen=True)
class _Joined:
    """A tensor that a rule of transformers makes of stored ones."""

    parts: tuple[tuple[str, ...], ...]
    patterns: tuple[str, ...]
    rule: WeightConverter
    model: Model
    target: str

    @cached_property
    def by_row(self) -> bool:
        """Return whether row i needs only the i-th tensor of each part: experts that are stored one by one."""
        return _is_by_row(self.rule.operations)

    def make(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the tensor, or some of its rows."""
        rule = deepcopy(self.rule)
        for pattern, tensors in zip(self.patterns, parts, strict=True):
            for tensor in tensors:
                rule.add_tensor(self.target, self.target, pattern, tensor)
        try:
            (made,) = rule.convert(self.target, model=self.model, config=config_of(self.model)).values()
        except Exception as error:  # operations have no common error class
            raise ModelError(
                f"the stored tensors do not make one {self.target}: {', '.join(self._facts(parts))}; "
                "copy the folder again"
            ) from error
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole

    def _facts(self, parts: Sequence[Sequence[Tensor]]) -> list[str]:
        """Return a tensor of each shape among the parts, and the patterns that no tensor has."""
        shapes = {
            tuple(tensor.shape): name
            for names, tensors in zip(self.parts, parts, strict=True)
            for name, tensor in zip(names, tensors, strict=False)  # a rank reads some rows
        }
        absent = [pattern for pattern in self.rule.source_patterns if pattern not in self.patterns]
        return [f"{n} of shape {list(s)}" for s, n in shapes.items()] + [f"none named {one}" for one in absent]


def _is_by_row(operations: Sequence[Any]) -> bool:
    first, *later = operations
    return isinstance(first, MergeModulelist) and first.dim == 0 and all(_keeps_rows(one) for one in later)


def _keeps_rows(operation: Any) -> bool:
    dims = [value for name, value in vars(operation).items() if name.startswith("dim")]
    return bool(dims) and all(type(dim) is int and dim > 0 for dim in dims)


def splits(model: Model, shapes: Mapping[str, Shape]) -> dict[str, Split]:
    """Return how a model's tensors are stored in the public layout, if it differs, by the model's names."""
    rules = stored_rules(model, legacy=False)[::-1]
    back = [rule.reverse_transform() for rule in rules if not isinstance(rule, PrefixChange)]
    renamings = [rule for rule in back if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in back if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found = dict[str, Split]()
    for name, shape in shapes.items():
        renamed, pattern = rename_source_key(name, [], converters)
        if pattern is not None:
            found[name] = _Reverted(name, renamed, pattern, by_pattern[pattern], model, renamings, shape)
        elif (other := _renamed(name, renamings)) != name:
            found[name] = Unchanged(other, shape)
    return found


@dataclass(frozen=True)
class _Reverted:
    """A tensor that a rule of transformers cuts into those of the public layout."""

    name: str
    renamed: str
    pattern: str
    rule: WeightConverter
    model: Model
    renamings: list[WeightRenaming]
    shape: Shape

    @property
    def by_row(self) -> bool:
        """Return whether each row becomes tensors of its own."""
        return _is_by_row([one.reverse_op for one in self.rule.operations[::-1]])

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the shapes of the stored tensors."""
        return {name: tuple(one.shape) for name, one in self._convert(torch.empty(self.shape, device="meta")).items()}

    def cut(self, rows: Tensor, first: int) -> Mapping[str, Rows]:
        """Return the stored tensors of some rows."""
        cut = self._convert(rows)
        if not self.by_row:
            return {name: Rows(one, 0) for name, one in cut.items()}
        # The rule counts experts from 0 in each of the patterns.
        names, each = list(self.shapes), self.shape[0]
        kept = [names[start + row] for start in range(0, len(names), each) for row in range(first, first + len(rows))]
        return {name: Rows(one, 0) for name, one in zip(kept, cut.values(), strict=True)}

    def _convert(self, tensor: Tensor) -> dict[str, Tensor]:
        rule = deepcopy(self.rule)
        rule.add_tensor(self.renamed, self.name, self.pattern, tensor)
        made = rule.convert(self.renamed, model=self.model, config=config_of(self.model))
        return {_renamed(name, self.renamings): one[0] if isinstance(one, list) else one for name, one in made.items()}


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    renamed: str = rename_source_key(name, renamings, [])[0]
    return renamed


def write_configs(model: Any, config: Any, folder: Path, facts: ExportFacts) -> None:
    """Write config.json and generation_config.json, so that transformers can load the folder without the run."""
    config.architectures = [type(model).__name__]
    config.dtype = facts.dtype
    if getattr(model, "trains_routers", False):
        config.output_router_logits = True
    generation = generation_config(model, facts.home) if model.can_generate() else {}
    if facts.tokens is not None:
        align(config, generation, facts.tokens)
        end_also_at(generation, facts.ends)
        if pools(model) and getattr(config, "pad_token_id", None) is None:
            # transformers finds the last token of each row by it, and accepts no batches without.
            config.pad_token_id = facts.tokens.eos
    config.save_pretrained(folder)
    if model.can_generate():
        write_durably(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def end_also_at(generation: dict[str, Any], tokens: Sequence[int]) -> None:
    """Make generation also end at some tokens."""
    ends = _as_list(generation.get("eos_token_id"))
    if more := [token for token in tokens if token not in ends]:
        generation["eos_token_id"] = [*ends, *more]


def align(config: Any, generation: dict[str, Any], tokens: SpecialTokens) -> None:
    """Give config and generation config the tokenizer's special tokens by the rule of transformers' Trainer.

    Other EOS tokens of a list, and of the generation config, stay: each of them ends generation.
    """
    for name, token in (("eos_token_id", tokens.eos), ("bos_token_id", tokens.bos), ("pad_token_id", tokens.pad)):
        own, generated = getattr(config, name, None), _as_list(generation.get(name))
        if token is None or (token in _as_list(own) and token in generated):
            continue
        several = name == "eos_token_id"
        others = [one for one in own if one != token] if several and isinstance(own, list) else []
        setattr(config, name, [token, *others] if several and isinstance(own, list) else token)
        generation[name] = [token, *(one for one in generated if one != token)] if several else token


def generation_config(model: Any, home: Path | None) -> dict[str, Any]:
    """Return the fields of a folder's generation_config.json, or else the fields that follow from a model's config.

    Raises DataError for a file that is not a JSON object.
    """
    file = None if home is None else home / "generation_config.json"
    try:
        text = model.generation_config.to_json_string() if file is None or not file.exists() else read_input(file)
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}; correct it, and export again") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a JSON {type(found).__name__}, not an object; correct it, and export again")
    return found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
