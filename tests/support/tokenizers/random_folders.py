"""Tokenizer folders made at random: every place that can name a token, a BOS or a template."""

import json
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.tokenizers.chats import CHATML, GEMMA, LLAMA, MARKED

NAMES = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "[CALL]", "<think>", "</think>"]
NAMES += ["<tool>"]
TOOL_USE = "{% if tools %}[tools]{{ tools | tojson }}{% endif %}" + CHATML
# Turns end with the marker of the next role, as in GLM.
NEXT_ROLE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TEMPLATES = [CHATML, MARKED, LLAMA, GEMMA, NEXT_ROLE, TOOL_USE]
_CLASSES = [None, "PreTrainedTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast"]
_CLASSES += ["GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer", "CustomTokenizer"]
_MODELS = [None, None, "qwen3", "llama", "gpt2", "gemma", "mistral", "opt", "unknown_model"]


def write_random_tokenizer(folder: Path, seed: int) -> None:
    """Write a tokenizer folder; transformers may refuse it."""
    random = Random(seed)
    folder.mkdir()
    tokenizer = _backend(random)
    names = random.sample(NAMES, random.randint(3, len(NAMES)))
    names += ["<|user|>", "<|assistant|>"] if random.random() < 0.3 else []
    config: dict[str, Any] = {"model_max_length": 1024, "clean_up_tokenization_spaces": random.random() < 0.2}
    _add_tokens(random, folder, tokenizer, names, config)
    bos = _name_special_tokens(random, folder, names, config)
    _post_process(random, tokenizer, names, bos)
    _give_template(random, folder, config)
    if random.random() < 0.1:
        tokenizer.enable_truncation(8)
    if random.random() < 0.1:
        tokenizer.enable_padding(length=32)
    if (kind := random.choice(_CLASSES)) is not None:
        config["tokenizer_class"] = kind
    for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens", "legacy"):
        if random.random() < 0.08:
            config[name] = random.random() < 0.7
    if random.random() < 0.2:
        config |= {"name_or_path": "/nowhere", "tokenizer_file": "/nowhere/tokenizer.json"}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if (model := random.choice(_MODELS)) is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model}))


def _backend(random: Random) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ġw", "or", "ord", "Ġword", "<eos>"][: len(alphabet) + random.choice([4, 5])]
    vocab = {word: number for number, word in enumerate(words)}
    if random.random() < 0.2:
        vocab["hole"] = 900  # ids may have holes
    if random.random() < 0.2:
        tokenizer = Tokenizer(
            models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((c, -2.0) for c in "abdehiloprstuwy.,?!")], 0)
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return tokenizer
    if random.random() < 0.15:
        return _with_byte_fallback(random)
    if random.random() < 0.15:
        return _with_word_pieces(random)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "w"), ("o", "r"), ("or", "d"), ("Ġw", "ord")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=random.random() < 0.3)
    tokenizer.decoder = decoders.ByteLevel()
    if random.random() < 0.2:
        tokenizer.normalizer = random.choice([normalizers.NFC(), normalizers.Lowercase(), normalizers.Prepend("▁")])
    return tokenizer


def _with_byte_fallback(random: Random) -> Tokenizer:
    """Return a tokenizer like Llama 2's: pieces with spaces as "▁", and bytes of all other characters."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abdehiloprstuwy", "▁w", "or"]
    vocab = {word: number for number, word in enumerate(words)}
    model = models.BPE(vocab, [("▁", "w"), ("o", "r")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    if random.random() < 0.5:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        scheme = random.choice(["first", "always", "never"])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=random.random() < 0.5)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _with_word_pieces(random: Random) -> Tokenizer:
    """Return a tokenizer like BERT's, whose pieces within a word begin with ##."""
    words = ["[UNK]", *"abdehiloprstuwyx.,?!", *(f"##{letter}" for letter in "abdehiloprstuwyx"), "word", "two"]
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=random.random() < 0.5)
    if random.random() < 0.5:
        tokenizer.normalizer = normalizers.BertNormalizer()
    return tokenizer


def _add_tokens(random: Random, folder: Path, tokenizer: Tokenizer, names: list[str], config: dict[str, Any]) -> None:
    """Add tokens, each in one of the places from which transformers takes them."""
    decoder: dict[str, dict[str, Any]] = {}
    legacy: dict[str, int] = {}
    for name in names:
        special, place = random.random() < 0.5, random.choice(["tokenizer", "tokenizer", "decoder", "added", "nowhere"])
        takes = {side: random.random() < 0.1 for side in ("lstrip", "rstrip", "single_word")}
        token = AddedToken(name, special=special, normalized=random.random() < 0.3, **takes)
        if place == "tokenizer":
            tokenizer.add_tokens([token])
        elif place == "decoder":
            number = max(tokenizer.get_vocab_size(), 901) + len(decoder)
            keys = ("lstrip", "normalized", "rstrip", "single_word", "special")
            decoder[str(number)] = {"content": name} | {key: getattr(token, key) for key in keys}
        elif place == "added":
            legacy[name] = max(tokenizer.get_vocab_size(), 901) + len(legacy)
    if decoder and random.random() < 0.7:
        config["added_tokens_decoder"] = decoder
    if legacy:
        (folder / "added_tokens.json").write_text(json.dumps(legacy))


def _name_special_tokens(random: Random, folder: Path, names: list[str], config: dict[str, Any]) -> str | None:
    """Name EOS nearly always, BOS and PAD at times, in the config or in the legacy map; return BOS."""
    chosen = {
        key: random.choice(names)
        for key, often in (("eos", 0.95), ("bos", 0.6), ("pad", 0.4))
        if random.random() < often
    }
    in_map: dict[str, Any] = {}
    for key, name in chosen.items():
        value = random.choice([name, {"__type": "AddedToken", "content": name, "special": random.random() < 0.5}])
        (in_map if random.random() < 0.3 else config)[f"{key}_token"] = value
    if random.random() < 0.2:
        config["additional_special_tokens"] = random.sample(names, 2)
    if in_map:
        plain = {key: value["content"] if isinstance(value, dict) else value for key, value in in_map.items()}
        (folder / "special_tokens_map.json").write_text(json.dumps(plain))
    return chosen.get("bos")


def _post_process(random: Random, tokenizer: Tokenizer, names: list[str], bos: str | None) -> None:
    known = [name for name in names if tokenizer.token_to_id(name) is not None]
    if not known or random.random() < 0.3:
        return
    first = bos if bos in known and random.random() < 0.8 else random.choice(known)
    one, other = ((name, tokenizer.token_to_id(name) or 0) for name in (first, random.choice(known)))
    shape = random.choice([f"{one[0]} $A", f"{one[0]} $A {other[0]}", f"$A {other[0]}"])
    template = processors.TemplateProcessing(single=shape, special_tokens=[one, other])
    byte_level = processors.ByteLevel(trim_offsets=random.random() < 0.5)
    tokenizer.post_processor = random.choice(
        [
            template,
            template,
            byte_level,
            processors.Sequence([byte_level, template]),
            processors.BertProcessing(other, one),
        ]
    )


def _give_template(random: Random, folder: Path, config: dict[str, Any]) -> None:
    """Give one template or several: as a file, a field, a named list or a folder."""
    source, place = random.choice(_TEMPLATES), random.choice(["file", "field", "list", "folder", "none"])
    if place in ("file", "folder"):
        (folder / "chat_template.jinja").write_text(source)
        config |= {"chat_template": "old"} if random.random() < 0.3 else {}
    if place == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE)
    if place == "field":
        config["chat_template"] = source
    if place == "list":
        named = [{"name": "default", "template": source}, {"name": "tool_use", "template": TOOL_USE}]
        config["chat_template"] = random.sample(named, random.randint(1, 2))
