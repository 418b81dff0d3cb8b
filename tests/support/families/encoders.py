"""Small configs of masked language models of transformers."""

from typing import Any

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LARGE = {"max_position_embeddings": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": SIZES | DROPOUT | LARGE,
    "modernbert": SIZES
    | {"pad_token_id": 0, "layer_types": ["full_attention", "sliding_attention"], "local_attention": 4},
    "roberta": SIZES | DROPOUT | LARGE,
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
}
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
XLM = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
OTHERS: dict[str, dict[str, Any]] = {
    "albert": SIZES | DROPOUT | LARGE | {"embedding_size": 8},
    "big_bird": SIZES | DROPOUT | LARGE | {"attention_type": "original_full"},
    "camembert": SIZES | DROPOUT | LARGE,
    "data2vec-text": SIZES | DROPOUT | LARGE,
    "deberta": SIZES | DROPOUT | LARGE | DISENTANGLED,
    "deberta-v2": SIZES | DROPOUT | LARGE | DISENTANGLED,
    "electra": SIZES | DROPOUT | LARGE | {"embedding_size": 8},
    "ernie": SIZES | DROPOUT | LARGE,
    "esm": SIZES | DROPOUT | LARGE | {"pad_token_id": 1, "mask_token_id": 4},
    "esmc": SIZES,
    "eurobert": SIZES | {"num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3},
    "flaubert": XLM,
    "gte": SIZES | DROPOUT,
    "ibert": SIZES | DROPOUT | LARGE,
    "jina_embeddings_v3": SIZES | DROPOUT | LARGE,
    "layoutlm": SIZES | DROPOUT | LARGE,
    "longformer": SIZES | DROPOUT | LARGE | {"attention_window": 8},
    "luke": SIZES | DROPOUT | LARGE | {"entity_vocab_size": 20, "entity_emb_size": 8},
    "megatron-bert": SIZES | DROPOUT | LARGE,
    "mpnet": SIZES | DROPOUT | LARGE,
    "neomme": SIZES | {"num_key_value_heads": 1},
    "nomic_bert": SIZES | {"hidden_dropout_prob": 0.0},
    "rembert": SIZES | DROPOUT | LARGE | {"input_embedding_size": 8, "output_embedding_size": 8},
    "roberta-prelayernorm": SIZES | DROPOUT | LARGE,
    "roc_bert": SIZES | DROPOUT | LARGE,
    "roformer": SIZES | DROPOUT | LARGE,
    "tapas": SIZES | DROPOUT | LARGE,
    "ultrabert": SIZES,
    "xlm": XLM,
    "xmod": SIZES | DROPOUT | LARGE | {"default_language": "en_XX"},
    "xlm-roberta": SIZES | DROPOUT | LARGE,
    "xlm-roberta-xl": SIZES | DROPOUT | LARGE,
}
