"""The modules that are trained whole alongside adapters, and the choices of `model.lora`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.build import is_random
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.load import absent_weights
from train_loop.model.lora.choices import choices
from train_loop.spec import LoraSpec, ModelSpec

OF_LABELS = ("classifier", "score")
"""Modules that peft itself trains whole for heads of labels, whether a model has them or not."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Chosen:
    """The modules that `model.lora` of a spec chooses in its model, which has no adapters yet."""

    anatomy: Anatomy
    spec: ModelSpec
    lora: LoraSpec

    @cached_property
    def named(self) -> dict[str, nn.Module]:
        """The modules with parameters, by full name."""
        return {name: one for name, one in self.anatomy.model.named_modules() if name and _has_parameters(one)}

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """Full names of the modules that are trained whole, none of which is inside of another. Raises ModelError.

        As in peft, a name means all modules whose full names end with it. Heads of labels are among them, and what
        begins random above the weights of a folder.
        """
        for word in self.lora.modules_to_save:
            if not self._ending(word):
                message = f"modules_to_save {word} matches no module with parameters"
                raise ModelError(f"{message}; {choices(word, self.named)}")
        found, wanted = frozenset[str](), frozenset({*self.lora.modules_to_save, *self._heads, *self._random})
        # The names of an export match by their ends, too.
        while (more := frozenset(name for one in wanted for name in self._ending(one))) != found:
            found, wanted = more, more
        for name in found:
            self._check_saved(name)
        return tuple(name for name in self.named if name in found and not _inside(name, found - {name}))

    def cut_word(self, name: str) -> str | None:
        """Return a name in `modules_to_save` that ends inside of a part of those of all saved modules around `name`.

        peft would train these modules whole, and put adapters inside of them, too.
        """
        around = [one for one in self.named if f"{name}.".startswith(f"{one}.")]
        wanted = [word for word in self.lora.modules_to_save if any(one.endswith(word) for one in around)]
        is_whole = any(f".{one}".endswith(f".{word}") for one in around for word in wanted)
        return wanted[0] if wanted and not is_whole else None

    def _ending(self, wanted: str) -> list[str]:
        return [name for name in self.named if name.endswith(wanted)]

    @property
    def _heads(self) -> Iterator[str]:
        anatomy = self.anatomy
        if anatomy.labels:
            yield from OF_LABELS
            yield from (name for name, one in self.named.items() if one is anatomy.head)

    @property
    def _random(self) -> Iterator[str]:
        """Yield the outermost modules of which the folder has no weights, if any of these begins random."""
        absent = absent_weights(self.anatomy, self.spec)
        for name in absent:
            if is_random(self.anatomy, name):
                yield self._outermost(name, absent)

    def _outermost(self, name: str, absent: frozenset[str]) -> str:
        """Return the outermost module with a parameter that has no stored ones. Raises ModelError without one."""
        parts = name.split(".")[:-1]
        holders = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        for holder in holders:
            module = self.named[holder]
            own = {f"{holder}.{leaf}" for leaf, _ in module.named_parameters()}
            if (
                own <= absent
                and not isinstance(module, _LISTS)
                and self._shared.isdisjoint(map(id, module.parameters()))
            ):
                return holder
        raise ModelError(
            f"model.lora would freeze {name}, which {self.spec.path} lacks, so that it is random, and no export of "
            "adapters could have it; give a folder that has it, such as one of trainshed export --merged, or remove "
            "lora"
        )

    @cached_property
    def _shared(self) -> frozenset[int]:
        """Ids of the parameters that several modules have."""
        seen, found = set[int](), set[int]()
        for _, parameter in self.anatomy.model.named_parameters(remove_duplicate=False):
            (found if id(parameter) in seen else seen).add(id(parameter))
        return frozenset(found)

    def _check_saved(self, name: str) -> None:
        module = self.named[name]
        wanted = next((one for one in self.lora.modules_to_save if name.endswith(one)), name)
        if not self._shared.isdisjoint(map(id, module.parameters())):
            raise ModelError(
                f"modules_to_save {wanted} matches {name}, whose weights another module shares "
                "(tie_word_embeddings); peft would train one of both; name other modules"
            )
        if isinstance(module, _LISTS):
            raise ModelError(
                f"modules_to_save {wanted} matches {name}, a {type(module).__name__}, which peft cannot train whole; "
                "name modules inside of it"
            )


def choose(anatomy: Anatomy, spec: ModelSpec) -> Chosen:
    """Return what the `model.lora` of a spec chooses in its model."""
    assert spec.lora is not None, "the spec asks for adapters"
    return Chosen(anatomy, spec, spec.lora)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _inside(name: str, others: frozenset[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)
