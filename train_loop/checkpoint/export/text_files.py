"""The configs of an exported folder, and its files of tokenizer, chat templates and processors."""

import json
import logging
import re
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from train_loop.data.dataset import Dataset
from train_loop.data.text.answer_ends import ends_of_answers
from train_loop.data.text.chat import read_template
from train_loop.data.text.tokenizer_files import TEMPLATES, load_with_transformers, tokenizer_files
from train_loop.errors import DataError
from train_loop.model.build import DTYPES
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.families.family import ExportFacts, SpecialTokens
from train_loop.model.folder import model_folder, named_tokenizer
from train_loop.run_dir import RunDir, read_whole, write_durably
from train_loop.spec import JobSpec
from train_loop.system.input_files import read_input

log = logging.getLogger(__name__)

_OF_PROCESSORS = re.compile(r"(.*processor|.*preprocessor)_config\.json|chat_template\.json|.*\.spm")
_SAFE_NAME = re.compile(r"\w[\w.-]*")


def write_run_configs(spec: JobSpec, run_dir: RunDir, folder: Path, *, dtype: str) -> None:
    """Write configs, tokenizer and processors of a run of a model of transformers. Raises UserError, OSError."""
    write_texts(spec, family_of(spec).build(spec.model), tokenizer_of(spec, run_dir), folder, dtype)


def write_texts(spec: JobSpec, anatomy: Anatomy, tokenizer: Path | None, folder: Path, dtype: str) -> None:
    """Write configs and the files of tokenizer and processors, so that the folder can be loaded without the run."""
    tokens, ends = write_tokenizer(spec, anatomy, tokenizer, folder)
    facts = ExportFacts(DTYPES[dtype], model_folder(spec.model), tokens, ends)
    anatomy.family.write_configs(anatomy.model, folder, facts)


def write_tokenizer(
    spec: JobSpec, anatomy: Anatomy, tokenizer: Path | None, folder: Path
) -> tuple[SpecialTokens | None, list[int]]:
    """Write the files of tokenizer and processors; return its special tokens, and the ends of answers."""
    tokens, ends = None, list[int]()
    home = model_folder(spec.model)
    copy_text_files(tokenizer, home, folder)
    loaded = None if tokenizer is None else read_tokenizer(tokenizer, required=spec.data.reads_text)
    if tokenizer is not None and loaded is not None:
        tokens = special_tokens(loaded, anatomy.vocabulary or 0)
        head = spec.model.label_head
        if head is not None and head.reward is not None and tokens.pad is None:
            # Rewards were read before EOS at the end, which the preparation takes for padding, as TRL does.
            tokens = tokens._replace(pad=tokens.eos)
        ends = ends_of_answers(spec.data, str(tokenizer))
        write_template(spec, loaded, folder)
        name_class(folder, loaded)
    return tokens, ends


def tokenizer_of(spec: JobSpec, run_dir: RunDir) -> Path | None:
    """Return the folder of a run's tokenizer; None if the run has none."""
    try:
        dataset = Dataset.model_validate_json(read_whole(run_dir.data, below=run_dir.root))
    except (FileNotFoundError, ValueError):
        return None
    if dataset.tokenizer is not None:
        return Path(dataset.tokenizer)
    # Tokenised data needs no tokenizer: export the model's own.
    return named_tokenizer(spec.model)


def copy_text_files(tokenizer: Path | None, home: Path | None, folder: Path) -> None:
    """Copy the files of the run's tokenizer, and those of processors from its folder or the model's.

    Code and weights are never copied.
    """
    files = _of_processors(home) | _of_processors(tokenizer)
    if tokenizer is not None and tokenizer.is_dir():
        files |= tokenizer_files(tokenizer)
    for name in files.keys() - {"config.json"}:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(files[name])


def write_template(spec: JobSpec, loaded: PreTrainedTokenizerBase, folder: Path) -> None:
    """Make the chat template that a spec chooses the default of an exported folder; call it before `name_class`.

    All rows were trained with it. The tokenizer's template for conversations with tools is therefore left out: given
    tools, transformers would choose it instead.
    """
    chosen, file = spec.data.chat_template, spec.data.template_file
    if chosen is None:
        return
    own = loaded.chat_template if isinstance(loaded.chat_template, dict) else {"default": loaded.chat_template}
    source = own[chosen] if file is None else read_template(file)
    shutil.rmtree(folder / TEMPLATES, ignore_errors=True)
    (folder / "chat_template.json").unlink(missing_ok=True)
    write_durably(folder / "chat_template.jinja", source)
    for name in own.keys() - {chosen, "default", "tool_use"}:
        if _SAFE_NAME.fullmatch(name):
            (folder / TEMPLATES).mkdir(exist_ok=True)
            write_durably(folder / TEMPLATES / f"{name}.jinja", own[name])


def _of_processors(home: Path | None) -> dict[str, bytes]:
    found = home.iterdir() if home is not None and home.is_dir() else ()
    return {file.name: read_input(file) for file in found if _OF_PROCESSORS.fullmatch(file.name) and file.is_file()}


def name_class(folder: Path, loaded: PreTrainedTokenizerBase) -> None:
    """Name the class of a loaded tokenizer in an exported folder.

    Without it, transformers may choose another class by config.json, which is now that of the trained model, and split
    text into other tokens.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_bytes()) if file.exists() else {}
    config.pop("auto_map", None)  # code is not copied
    if (folder / "chat_template.jinja").exists():
        config.pop("chat_template", None)  # only old versions of transformers would read it
    # Version 4 of transformers does not have the name that version 5 gives to the plain class.
    name = type(loaded).__name__.replace("TokenizersBackend", "PreTrainedTokenizerFast")
    write_durably(file, json.dumps(config | {"tokenizer_class": name}, indent=2) + "\n")


def read_tokenizer(folder: Path, *, required: bool) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer as transformers loads it, without code from its folder; None if the folder has none.

    A tokenizer that cannot be loaded is an error if it is `required`; otherwise the reason is logged.
    """
    if not required and not (folder.is_dir() and tokenizer_files(folder).keys() - {"config.json"}):
        return None
    try:
        loaded: PreTrainedTokenizerBase = load_with_transformers(folder)
    except Exception as error:  # transformers and tokenizers raise no narrower type
        reason = f"the tokenizer in {folder} cannot be loaded: {' '.join(str(error).split())}"
        if required:
            raise DataError(f"{reason}; correct its files, and export again") from error
        log.error("%s; its special tokens are not in the exported configs", reason)
        return None
    return loaded


def special_tokens(loaded: PreTrainedTokenizerBase, vocab: int) -> SpecialTokens:
    """Return the special tokens of a tokenizer, without those that a model with `vocab` tokens lacks.

    transformers cannot load a model whose pad_token_id is outside its embeddings.
    """
    ids = (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id)
    return SpecialTokens(*(token if token is not None and token < vocab else None for token in ids))
