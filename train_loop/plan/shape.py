"""Sizes of a decoder that determine its memory and splits, read from a Hugging Face config without torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from train_loop.plan.built.units import Float8Linears, UnitTree
from train_loop.spec import ALL_LINEAR, LoraSpec, WrapPolicySpec

# Defaults of transformers' config classes; a test compares them with transformers itself. None means as many as
# attention heads, or hidden_size / num_attention_heads for head_dim.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": None,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
}
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "emb_dim", "dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    "num_attention_heads": (
        *("n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"),
        "num_decoder_attention_heads",
    ),
    "num_key_value_heads": ("num_kv_heads",),
}
"""Names of these sizes in GPT-2, BART and other families, the preferred one first."""

NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Required sizes. Without the others, each attention head has its own kv head, and F is 4 H."""
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
"""Families with a recurrent state and no attention; they count as one head."""


@dataclass(frozen=True)
class UnitSizes:
    """Numbers of parameters of a model's FSDP units.

    A parameter with a dtype of its own counts as the number of values in the compute dtype that need its bytes.
    """

    root: int
    """Parameters outside the other units, and tied embeddings: they stay gathered."""
    all: int
    """Parameters of all other units."""
    largest: int
    """Parameters of the largest unit, without those of units inside of it."""
    gathered: int
    """Most parameters that one unit and the units around it gather; without those of the two fields at the end."""
    ahead: int
    """The same with the unit that is gathered ahead."""
    has_head: bool = False
    """True if the head is a unit."""
    embeddings: int = 0
    """Parameters of the input embeddings that are a unit outside of layers, and are not gathered in backward."""
    head: int = 0
    """Parameters of the head that is a unit outside of layers, and stays gathered until its backward."""


@dataclass(frozen=True)
class ComputeBytes:
    """Bytes of a value that a model computes, if some of its modules have a dtype of their own."""

    layer: int
    """Most bytes in any layer."""
    layers: float
    """Mean of the layers."""
    head: int
    """Bytes of a logit."""


@dataclass(frozen=True)
class ParameterCounts:
    """Exact numbers of parameters, from the model on the meta device."""

    total: int
    trained: int
    """Parameters without the frozen ones."""
    trained_matrices: int
    """Trained matrices outside embeddings and head, which muon updates."""
    layer: int
    """Parameters of the largest decoder layer."""
    outside: int
    """Parameters outside the decoder layers."""
    module: int
    """Parameters of the largest module without its children: each rank draws them whole for random weights."""
    units: UnitSizes | None = None
    """The units, if they are not the layers alone."""
    compute: ComputeBytes | None = None
    """Bytes of what modules compute with `precision`; None without it."""
    wholes: int = 0
    """Parameters that each rank holds whole, `ignored_params`."""
    trained_wholes: int = 0
    quantized: int = 0
    """Frozen weights that are stored in few bits."""
    quantized_bytes: int = 0
    restored: int = 0
    """Values of the largest of these weights, which exist while it computes."""
    idle: int = 0
    """Parameters of experts that a token does not use."""
    experts: int = 0
    """Parameters of a layer's experts."""
    groups: tuple[dict[str, str | float | int], ...] = ()
    """Parameter groups of the optimizer with their settings and sizes."""
    of_rank: "ParameterCounts | None" = None
    """The numbers of what a rank has, if ranks share layers and their plan is known."""

    def shared(self, tp: int, ep: int) -> "ParameterCounts":
        """Return the numbers of a rank's part of each layer; it draws whole modules."""
        parts = _parts(self, tp)
        parts["layer"] = -(-(self.layer - self.experts) // tp) - (-self.experts // max(tp, ep))
        part, units = self.of_rank or replace(self, **parts), self.units
        return replace(part, module=self.module, units=units and replace(units, **_parts(units, tp)))


@dataclass(frozen=True)
class KeptBytes:
    """Bytes per token that a model keeps for its backward pass, counted in a call without memory."""

    inputs: int
    """Inputs of all layers, which stay also if layers are computed again."""
    layer: int
    """All that the layer keeps which keeps most; with tiles, of its MLPs one tile."""
    layers: int
    """All that the layers keep together, with inputs; with tiles, of their MLPs one tile."""
    outside: int
    """All that the model keeps outside of its layers and logits."""
    selected: int = 0
    """Matrix products of all layers whose results `selective` keeps."""


@dataclass(frozen=True)
class CallSizes:
    """Sizes of a call with a micro-batch, counted without values: of own code, encoders and models with labels."""

    rows: int
    activations: int | None = None
    """Bytes at the peak of forward and backward, without parameters and their gradients; None if unknown."""
    root_gradients: int = 0
    """Bytes of whole gradients that FSDP's root unit has at that time."""
    flops: int | None = None
    """FLOPs of forward and backward of own code, recomputation not included; None if unknown."""
    problem: str | None = None
    """Why they are unknown."""

    @property
    def flops_per_row(self) -> int | None:
        """Return the FLOPs of a row; None if unknown."""
        return None if self.flops is None else self.flops // self.rows


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
    labels: int | None = None
    """Values that the head gives; None if it gives logits of tokens."""
    pools: bool = False
    """Whether the head gives values for a row, and not for each token."""
    counts: ParameterCounts | None = None
    """Exact numbers of parameters; None if the model has not been built."""
    adapters: int | None = None
    """Estimated parameters of adapters, which alone are trained; None without adapters."""
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

    def with_adapters(self, lora: LoraSpec) -> "ModelShape":
        """Return the sizes with those of adapters, estimated for the layers of a dense decoder."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query}
        linear |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.intermediate)
        given = () if lora.target_modules == ALL_LINEAR else lora.target_modules
        names = linear.keys() & {name.rpartition(".")[2] for name in given}
        each = sum(self.hidden + linear[name] for name in names or linear)
        layers = self.layers if lora.layers is None else len(set(lora.layers))
        return replace(self, adapters=lora.r * each * layers)

    @property
    def known(self) -> bool:
        """Return True if the sizes describe the whole layer; for other families they are an estimate."""
        return self.model_type in _DEFAULTS

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
        every, trained = (
            -(-(size - whole) // ranks) + whole
            for size, whole in zip((self.parameters, self.trained), wholes, strict=True)
        )
        return every, trained

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

    def units(self, policy: WrapPolicySpec) -> UnitSizes:
        """Return the sizes of the units: layers with embeddings and head, or modules of a size.

        Without counts, the latter are an estimate: a layer that is large enough is one unit.
        """
        if self.counts is not None and self.counts.units is not None:
            return self.counts.units
        layer, root, layers = self.layer_parameters, self.embedding_parameters, self.layers * self.layer_parameters
        table, least = self.vocab * self.hidden, policy.min_num_params
        if least is None:
            return self._with_ends(UnitSizes(root, layers, layer, layer, min(2, self.layers) * layer), policy)
        unit = layer if layer >= least else layers
        if table < least or self.tied or self.labels is not None:
            return UnitSizes(root, layers, unit, unit, min(2 * unit, layers))
        largest = max(unit, table)
        ahead = max(min(2 * unit, layers), table + unit)
        return UnitSizes(root - 2 * table, layers + 2 * table, largest, largest, ahead, True)

    def _with_ends(self, units: UnitSizes, policy: WrapPolicySpec) -> UnitSizes:
        """Return the units of layers with the embeddings and the head that are units, too."""
        # A model that has been counted has no such units.
        if self.counts is not None or self.tied or self.labels is not None:
            return units
        table, layer = self.vocab * self.hidden, units.largest
        wraps = (policy.wrap_embeddings, policy.wrap_lm_output)
        embeddings, head = (table >= layer if wrap is None else wrap for wrap in wraps)
        moved, largest = (embeddings + head) * table, max(table, layer)
        if not moved:
            return units
        ahead, ends = max(units.ahead, table + layer), (embeddings * table, head * table)
        return UnitSizes(units.root - moved, units.all + moved, largest, units.gathered, ahead, head, *ends)

    @property
    def largest_module(self) -> int:
        """Return the parameters of the largest single module, which is the embedding if they are not counted."""
        return max(self.vocab, self.intermediate) * self.hidden if self.counts is None else self.counts.module


def _parts(sizes: "ParameterCounts | UnitSizes", ranks: int) -> dict[str, Any]:
    return {name: -(-size // ranks) for name, size in asdict(sizes).items() if type(size) is int}


def read_shape(config: dict[str, Any]) -> ModelShape:
    """Read the sizes of a config, with its family's defaults. Raises ValueError for a missing or invalid size."""
    model_type = config["model_type"]
    renamed = {
        name: config[other] for name, others in _OTHER_NAMES.items() for other in reversed(others) if other in config
    }
    if isinstance(kinds := config.get("layers_block_type"), list):
        renamed.setdefault("num_hidden_layers", len(kinds))
    if config.get("multi_query"):
        renamed["num_key_value_heads"] = 1
    if model_type in WITHOUT_ATTENTION:
        renamed["num_attention_heads"] = 1
    sizes = {**_DEFAULTS.get(model_type, {}), **renamed, **config}
    missing = [name for name in NEEDED if name not in sizes]
    if missing:
        raise ValueError(
            f"the sizes of model_type={model_type} must be given; add {', '.join(missing)} to the model's config (only "
            f"{', '.join(_DEFAULTS)} have default sizes here)"
        )
    heads = _positive(sizes, "num_attention_heads")
    hidden = _positive(sizes, "hidden_size")
    bias = bool(sizes.get("attention_bias", False))
    return ModelShape(
        model_type=model_type,
        vocab=_positive(sizes, "vocab_size"),
        hidden=hidden,
        intermediate=_positive(sizes, "intermediate_size", 4 * hidden),
        layers=_positive(sizes, "num_hidden_layers"),
        heads=heads,
        kv_heads=_positive(sizes, "num_key_value_heads", heads),
        head_dim=_positive(sizes, "head_dim", hidden // heads),
        tied=bool(sizes.get("tie_word_embeddings", False)),
        qkv_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=bool(sizes.get("mlp_bias", False)),
        qk_norm=model_type == "qwen3",
    )


def _positive(sizes: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if sizes.get(name) is None else sizes[name]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        value = max(value)  # a size for each layer
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r} is not a positive whole number; correct it in the model's config")
    return value
