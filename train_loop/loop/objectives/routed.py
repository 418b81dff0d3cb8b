"""Routers of a mixture of experts: their losses, which are added to an objective's, and the load of experts.

T: tokens that this rank routes, E: experts of a layer, L: layers with experts, K: experts that a token uses, S: scopes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train_loop.data.dataset import IGNORE
from train_loop.loop.batch import MicroBatch, StepBatch
from train_loop.loop.objectives.objective import Objective, Terms
from train_loop.loop.objectives.routed_tokens import RoutedTokens
from train_loop.model.families.anatomy import Anatomy, Experts
from train_loop.spec import TrainingSpec

IDLE_STEPS = 100
"""Steps without a token after which an expert is reported, and again after as many more."""


@dataclass(frozen=True)
class RouterRule:
    """Weights of the losses of routers."""

    auxiliary: float
    z_loss: float
    by_document: bool
    """True if the losses are means over each document, and not over the micro-batches of all ranks together."""

    @classmethod
    def of(cls, training: TrainingSpec, experts: Experts) -> "RouterRule":
        """Return the rule of a spec; by default the auxiliary loss is that of the model's own config."""
        chosen = training.router_aux_loss
        auxiliary = (experts.auxiliary or 0.0) if chosen.coef is None else chosen.coef
        return cls(auxiliary, training.router_z_loss or 0.0, chosen.scope == "sequence")


class RouterWatch:
    """Recorder of routers' logits and choices in an objective's calls, without recomputation and evaluations."""

    def __init__(self, experts: Experts, tokens: RoutedTokens) -> None:
        self._logits, self._tokens = list[Tensor](), tokens
        self._valid: Tensor | None = None
        """True for the tokens of a call that count, [T]; None outside of calls."""
        self._loads = torch.zeros(len(experts.modules), experts.number, dtype=torch.int64, device=tokens.mesh.device)
        self._earlier = torch.zeros_like(self._loads)
        """Loads on all ranks that are already summed, but not yet in a metrics line."""
        for router in experts.routers:
            router.register_forward_hook(self._see_logits)
        for layer, module in enumerate(experts.modules):
            module.register_forward_pre_hook(_Choices(self, layer), with_kwargs=True)

    @contextmanager
    def seeing(self, valid: Tensor) -> Iterator[None]:
        """Watch the calls within the context, whose tokens count where `valid` [T] is true."""
        self._valid, self._logits = valid, []
        try:
            yield
        finally:
            self._valid = None

    def _see_logits(self, router: nn.Module, inputs: Any, output: Any) -> None:
        if self._valid is not None:
            self._logits.append(output if isinstance(output, Tensor) else output[0])

    def see_choices(self, layer: int, chosen: Tensor) -> None:
        """Count the tokens of each expert, given the experts [T, K] that a layer's tokens use."""
        if self._valid is not None:
            each = self._valid.long().repeat_interleave(chosen.shape[-1])
            self._loads[layer].index_add_(0, chosen.detach().reshape(-1).long(), each)

    def take_logits(self) -> list[Tensor]:
        """Return the logits [T, E] of each router in the last call, and keep none: they need memory."""
        logits, self._logits = self._logits, []
        return logits

    def sum_loads(self) -> Tensor:
        """Return the tokens of each expert [L, E] of all ranks since the last call. A collective call."""
        loads, self._loads = self._tokens.sum(self._loads), torch.zeros_like(self._loads)
        self._earlier += loads
        return loads

    def take_loads(self) -> list[list[int]]:
        """Return the tokens of each expert [L, E] of all ranks since the last metrics line. A collective call."""
        self.sum_loads()
        found: list[list[int]] = self._earlier.tolist()
        self._earlier.zero_()
        return found


@dataclass(frozen=True)
class _Choices:
    """A hook before the experts of a layer."""

    watch: RouterWatch
    layer: int

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.watch.see_choices(self.layer, named["top_k_index"] if "top_k_index" in named else inputs[1])


@dataclass(frozen=True)
class Scopes:
    """The parts of a micro-batch in which routers' losses are means: all ranks' tokens together, or each document."""

    of_token: Tensor
    """Scope of each token of this rank, [T]."""
    valid: Tensor
    """1 for each token that is not padding, [T]."""
    counts: Tensor
    """Tokens and the divisor's share of each scope, over all ranks that have some of its tokens, [2, S] in float64."""
    group: dist.ProcessGroup | None
    """These ranks; None for all."""

    @classmethod
    def of(cls, batch: MicroBatch, tokens: RoutedTokens, *, by_document: bool) -> "Scopes":
        """Return the scopes of a micro-batch. A collective call."""
        valid = tokens.valid(batch)
        of_token, number = (
            tokens.documents(batch.position_ids) if by_document else (torch.zeros_like(valid, dtype=torch.int64), 1)
        )
        of_token = of_token.flatten()
        weights = tokens.own((batch.labels != IGNORE) if batch.weights is None else batch.weights)
        shares = torch.stack([valid, weights]).double().flatten(1)
        counts = torch.zeros(2, number, dtype=torch.float64, device=shares.device).index_add_(1, of_token, shares)
        group = tokens.sequence if by_document else None
        dist.all_reduce(counts, group=group)
        return cls(of_token, valid.flatten().float(), counts, group)

    def per_token(self, layers: int) -> Tensor:
        """Return the weight of each token in a mean over the tokens of all layers, [T]."""
        tokens, shares = self.counts
        weights: Tensor = (shares / (tokens * layers).clamp(min=1)).float()
        return weights[self.of_token] * self.valid

    def sums(self, values: Tensor) -> Tensor:
        """Sum values of tokens, [T, E] → [S, E], over this rank's tokens that are not padding."""
        counted = values * self.valid[:, None]
        if self.counts.shape[1] == 1:
            return counted.sum(0, keepdim=True)
        return counted.new_zeros(self.counts.shape[1], values.shape[1]).index_add(0, self.of_token, counted)

    def auxiliary(self, logits: Sequence[Tensor], chosen: int) -> Tensor:
        """Return this rank's part of E x the sum over experts of (their share of tokens x their mean probability).

        Fedus et al., "Switch Transformers" (2021), over the tokens of all layers together, as in transformers. The
        shares have no gradient and the probability is linear, so that the ranks' parts add up to the whole.
        """
        chances = [one.softmax(-1) for one in logits]
        with torch.no_grad():
            marks = [torch.zeros_like(one).scatter_(-1, one.topk(chosen, -1).indices, 1.0) for one in chances]
            loads = self.sums(_total(marks))
            dist.all_reduce(loads, group=self.group)
            tokens, shares = self.counts
            factors = (shares * logits[0].shape[-1] / (tokens * len(logits)).clamp(min=1).square()).float()
        parts: Tensor = factors[:, None] * loads * self.sums(_total(chances))
        return parts.sum()


def _total(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape."""
    first, *others = tensors
    return sum(others, start=first)


class IdleExperts:
    """Experts that get no token, step after step."""

    def __init__(self) -> None:
        self.begin = 0
        """Step after which tokens are counted."""
        self._seen = dict[tuple[int, int], int]()
        """Newest step with tokens of each expert (layer, number); that of the warning after one."""

    def news(self, loads: Sequence[Sequence[int]], *, step: int) -> list[tuple[int, int]]:
        """Return the experts (layer, number) without tokens for another `IDLE_STEPS` steps, given tokens up to now."""
        each = [(layer, number) for layer, experts in enumerate(loads) for number in range(len(experts))]
        for layer, number in each:
            seen = self._seen.setdefault((layer, number), self.begin)
            self._seen[layer, number] = step if loads[layer][number] else seen
        late = [one for one in each if step - self._seen[one] >= IDLE_STEPS]
        self._seen |= dict.fromkeys(late, step)
        return late


def remedy_of(experts: Experts) -> str:
    """Return what spreads tokens over more experts."""
    if experts.balanced:
        return "set model.router_bias_update, or a larger one"
    if experts.auxiliary is not None:
        return "set training.router_aux_loss.coef, or a larger one"
    return "choose a larger global_batch_size, or another mixture: the code of this one has no auxiliary loss"


class RoutedLoss:
    """An objective of a mixture of experts, with the losses of its routers.

    Each of them is a mean over the tokens of a scope: a micro-batch of all ranks, or a document. A scope weighs as much
    as it has of the step's divisor, so that neither accumulation nor the mesh changes the sum over scopes.
    """

    def __init__(self, inner: Objective, experts: Experts, rule: RouterRule, tokens: RoutedTokens) -> None:
        self._inner, self._rule, self._tokens, self._chosen = inner, rule, tokens, experts.chosen
        self.watch = RouterWatch(experts, tokens)
        on = {"router_aux_loss": rule.auxiliary, "router_z_loss": rule.z_loss, "router_entropy": True}
        self.idle, self.remedy = IdleExperts(), remedy_of(experts)
        self._names = tuple(name for name, weight in on.items() if weight and experts.auxiliary is not None)
        self.sums = (*inner.sums, *self._names)
        self.columns, self.evaluation_sums = inner.columns, inner.evaluation_sums

    @property
    def inner(self) -> Objective:
        """Return the objective without the losses of routers."""
        return self._inner

    @property
    def anatomy(self) -> Anatomy:
        """Return the parts of the model."""
        return self._inner.anatomy

    def divisor(self, batch: StepBatch) -> Tensor | None:
        """Return the inner objective's share of the divisor."""
        return self._inner.divisor(batch)

    def evaluate(self, batch: MicroBatch) -> tuple[Tensor, ...]:
        """Return the inner objective's sums: evaluations have no losses of routers."""
        return self._inner.evaluate(batch)

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float | int]:
        """Return the inner objective's results."""
        return self._inner.metrics(sums)

    def __call__(self, batch: MicroBatch) -> Terms:
        """Return the inner objective's terms with the losses of routers. A collective call."""
        with self.watch.seeing(self._tokens.valid(batch).flatten()):
            terms = self._inner(batch)
        logits = self.watch.take_logits()
        if not self._names:
            return terms
        scopes = Scopes.of(batch, self._tokens, by_document=self._rule.by_document)
        losses = self._losses([one.float() for one in logits], scopes)
        found = {name: self._tokens.of_slice(value) for name, value in losses.items()}
        total = terms.total + self._rule.auxiliary * found.get("router_aux_loss", 0.0)
        total = total + self._rule.z_loss * found.get("router_z_loss", 0.0)
        return Terms(total, terms.count, {**terms.sums, **found}, terms.stands_in)

    def _losses(self, logits: Sequence[Tensor], scopes: Scopes) -> dict[str, Tensor]:
        """Return this rank's part of each sum, given the logits [T, E] of each router."""
        each, found = scopes.per_token(len(logits)), dict[str, Tensor]()
        if self._rule.auxiliary:
            found["router_aux_loss"] = scopes.auxiliary(logits, self._chosen)
        if self._rule.z_loss:
            found["router_z_loss"] = _total((each * one.logsumexp(-1).square()).sum() for one in logits)
        with torch.no_grad():
            logs = (one.log_softmax(-1) for one in logits)
            found["router_entropy"] = _total(-(each * (log.exp() * log).sum(-1)).sum() for log in logs)
        return found
