"""Causal language models of transformers."""

from torch import nn
from transformers import PreTrainedModel

from train_loop.model.families.anatomy import Anatomy


def causal_anatomy(model: PreTrainedModel) -> Anatomy:
    """Return the parts of a causal language model."""
    config, own = model.config.get_text_config(), set(model._no_split_modules or ())
    heads = config.num_attention_heads
    return Anatomy(
        model,
        layers=tuple(one for one in model.modules() if one is not model and type(one).__name__ in own),
        embeddings=model.get_input_embeddings(),
        head=model.get_output_embeddings(),
        norms=tuple(one for one in model.modules() if is_norm(one)),
        depth=config.num_hidden_layers,
        attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
    )


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer with parameters of its own."""
    return "Norm" in type(module).__name__ and any(True for _ in module.parameters(recurse=False))
