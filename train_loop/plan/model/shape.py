"""Sizes of a decoder that determine its memory and splits."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from train_loop.plan.built.units import Float8Linears, UnitTree
from train_loop.plan.memory.term import DTYPE_BYTES
from train_loop.plan.model.counts import CallSizes, KeptBytes, ParameterCounts, QuantizedWeights, UnitSizes
from train_loop.spec import ALL_LINEAR, ModelSpec, StrategySpec, WrapPolicySpec


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder: H hidden, F intermediate, L layers, V vocabulary, attention heads and kv heads of head_dim."""

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    known: bool = False
    """True if the sizes describe the whole layer; for other families they are an estimate."""
    labels: int | None = None
    """Values that the head gives; None if it gives logits of tokens."""
    pools: bool = False
    """Whether the head gives values for a row, and not for each token."""
    counts: ParameterCounts | None = None
    """Exact numbers of parameters; None if the model has not been built."""
    adapters: int | None = None
    """Estimated parameters of adapters, which alone are trained; None without adapters."""
    quantized: QuantizedWeights | None = None
    """Frozen weights in few bits; estimated until the model has been built."""
    call: CallSizes | None = None
    """Sizes of a call of own code or of an encoder; None for other models, and before the call."""
    whole_scores: bool = False
    """True if attention computes whole matrices of scores, because the family's code has no other way."""
    kept: KeptBytes | None = None
    """Bytes that the model keeps for backward; None if the formula for a language model of a known family is right."""
    tiles: bool | None = None
    """Whether MLPs of the model can compute in tiles; None if the model has not been built."""
    built: UnitTree | None = None
    """FSDP units and module tree; None if the model has not been built."""
    float8: Float8Linears | None = None
    """Linear modules that compute in float8; None without `strategy.float8`, and if the model has not been built."""
    rotated: int | None = None
    """Positions that the model's config states for rotations of queries and keys; None if there are none."""
    loss_depends_on_micro_batch: bool = False
    """True if other micro-batches of the same step have another loss."""
    notes: tuple[str, ...] = ()
    """Warnings about the spec's choices in the model; empty if the model has not been built."""

    @classmethod
    def of_code(cls) -> "ModelShape":
        """Return the shape of own code: no sizes of a decoder, until its parameters are counted."""
        return cls("code", 0, 0, 0, 0, 1, 1, 0, False, False, False, False, False)

    def shared(self, *, tp: int, ep: int = 1) -> "ModelShape":
        """Return the sizes of a rank's part, if ranks share each layer: heads, F, vocabulary and parameters / tp.

        Ranks that share experts have 1 / ep of them.
        """
        if tp == ep == 1:
            return self
        parts = {name: -(-getattr(self, name) // tp) for name in ("heads", "kv_heads", "intermediate", "vocab")}
        return replace(self, **parts, counts=None if self.counts is None else self.counts.shared(tp, ep))

    def adapted(self, model: ModelSpec) -> "ModelShape":
        """Return the sizes with `model.lora` and `model.quantize_base`, estimated for layers of a dense decoder."""
        if (lora := model.lora) is None:
            return self
        linear = self.linear_layers
        names = linear.keys() & _last_parts(() if lora.target_modules == ALL_LINEAR else lora.target_modules)
        each = sum(sum(linear[name]) for name in names or linear)
        layers = self.layers if lora.layers is None else len(set(lora.layers))
        frozen = [linear[name] for name in linear.keys() - _last_parts(lora.modules_to_save)]
        return replace(self, adapters=lora.r * each * layers, quantized=self._quantized(frozen, model.quantize_base))

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of the linear layers of a dense decoder's layer."""
        query, key, inner = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        of_attention = {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
        }
        of_mlp = {"gate_proj": (self.hidden, inner), "up_proj": (self.hidden, inner), "down_proj": (inner, self.hidden)}
        return of_attention | of_mlp

    def _quantized(self, linear: Collection[tuple[int, int]], kind: str | None) -> QuantizedWeights | None:
        """Return the sizes of linear layers of every decoder layer with weights in few bits."""
        if kind is None or not linear:
            return None
        sizes = [inputs * outputs for inputs, outputs in linear]
        # Codes, and scales in bf16: for 64 inputs of a row, or for a row.
        scales = sum(sizes) // 64 if kind == "nf4" else sum(outputs for _, outputs in linear)
        stored = sum(sizes) // (2 if kind == "nf4" else 1) + 2 * scales
        return QuantizedWeights(self.layers * sum(sizes), self.layers * stored, max(sizes))

    @property
    def can_tile(self) -> bool:
        """Return True if MLPs can compute in tiles; False if they cannot, or if this is not known yet."""
        return self.known if self.tiles is None else self.tiles

    @property
    def is_measured(self) -> bool:
        """Return True if a call has shown the bytes that forward and backward keep."""
        return self.call is not None and self.call.activations is not None

    @property
    def outputs(self) -> int:
        """Return the number of values that the head gives: tokens of the vocabulary, or labels."""
        return self.vocab if self.labels is None else self.labels

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one decoder layer: attention, gated MLP, two norms."""
        if self.counts is not None:
            return self.counts.layer
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key)
        biases = (query + 2 * key) * self.qkv_bias + self.hidden * self.output_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        return attention + 3 * self.hidden * self.intermediate + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters outside the layers: embedding, final norm and, unless it is tied, the head."""
        if self.counts is not None:
            return self.counts.outside
        return self.hidden * (self.vocab + (0 if self.tied else self.outputs) + 1)

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model."""
        if self.counts is not None:
            return self.counts.total
        return self.layers * self.layer_parameters + self.embedding_parameters + (self.adapters or 0)

    @property
    def active(self) -> int | None:
        """Return the parameters that a token uses; None for a dense model, and before they are counted."""
        return self.counts.total - self.counts.idle if self.counts is not None and self.counts.idle else None

    def on_rank(self, ranks: int) -> tuple[int, int]:
        """Return the parameters and the trained parameters of a rank, if `ranks` of them share the others."""
        counts = self.counts
        wholes = (0, 0) if counts is None else (counts.wholes, counts.trained_wholes)
        if counts is not None and counts.rows:
            # A rank has whole rows: of few, some ranks have none.
            parts = [(-(-rows // ranks) / rows, *values) for rows, *values in counts.rows]
            shares = [round(sum(part * values[own] for part, *values in parts)) for own in (0, 1)]
            return shares[0] + wholes[0], shares[1] + wholes[1] if counts.trained else 0
        every, trained = (
            -(-(size - whole) // ranks) + whole
            for size, whole in zip((self.parameters, self.trained), wholes, strict=True)
        )
        return every, trained

    def updated(self, ranks: int = 1) -> int:
        """Return the trained parameters that get gradients, of a rank if `ranks` share the parameters."""
        unused = 0 if self.counts is None else self.counts.unused
        return max(self.on_rank(ranks)[1] - unused // ranks, 0)

    @property
    def trained(self) -> int:
        """Return the trained parameters: all of them, unless frozen ones have been counted, or those of adapters."""
        if self.counts is not None:
            return self.counts.trained
        return self.parameters if self.adapters is None else self.adapters

    @property
    def trained_matrices(self) -> int:
        """Return the parameters that muon updates; without counts, those of the layers or of adapters."""
        if self.counts is not None:
            return self.counts.trained_matrices
        return self.layers * self.layer_parameters if self.adapters is None else self.adapters

    def units(self, strategy: StrategySpec) -> UnitSizes:
        """Return the sizes of the units: layers with embeddings and head, or modules of a size.

        Without counts, the latter are an estimate: a layer that is large enough is one unit.
        """
        if self.counts is not None and self.counts.units is not None:
            return self.counts.units
        policy, layer, root = strategy.wrap_policy, self.layer_parameters, self.embedding_parameters
        values = layer
        if (few := self.quantized) is not None:
            # Codes and scales, of about a byte each, are gathered as they are stored.
            values -= (few.values - few.bytes) // self.layers
            layer -= (few.values - few.bytes // DTYPE_BYTES[strategy.param_dtype]) // self.layers
        layers, table, least = self.layers * layer, self.vocab * self.hidden, policy.min_num_params
        if least is None:
            units = UnitSizes(root, layers, layer, layer, min(2, self.layers) * layer)
            return self._with_ends(units, policy, least=values)
        unit = layer if layer >= least else layers
        if table < least or self.tied or self.labels is not None:
            return UnitSizes(root, layers, unit, unit, min(2 * unit, layers))
        largest = max(unit, table)
        ahead = max(min(2 * unit, layers), table + unit)
        return UnitSizes(root - 2 * table, layers + 2 * table, largest, largest, ahead, True)

    def _with_ends(self, units: UnitSizes, policy: WrapPolicySpec, *, least: int) -> UnitSizes:
        """Return the units of layers with the embeddings and the head that are units, too.

        By default they are, if they have as many values as a layer, `least`.
        """
        # A model that has been counted has no such units.
        if self.counts is not None or self.tied or self.labels is not None:
            return units
        table, layer = self.vocab * self.hidden, units.largest
        wraps = (policy.wrap_embeddings, policy.wrap_lm_output)
        embeddings, head = (table >= least if wrap is None else wrap for wrap in wraps)
        moved, largest = (embeddings + head) * table, max(table, layer)
        if not moved:
            return units
        ahead, ends = max(units.ahead, table + layer), (embeddings * table, head * table)
        return UnitSizes(units.root - moved, units.all + moved, largest, units.gathered, ahead, head, *ends)

    @property
    def largest_module(self) -> int:
        """Return the parameters of the largest single module, which is the embedding if they are not counted."""
        return max(self.vocab, self.intermediate) * self.hidden if self.counts is None else self.counts.module


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}
