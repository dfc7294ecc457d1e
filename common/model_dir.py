"""A model folder as Hugging Face lays it out: found, read and checked once, before anything heavy is loaded.

Every fault is one line that names the path and what is wrong. Only the local folder is looked at, never a network.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import StartError
from common.json_files import read_object, read_object_if_there
from common.tokenizer_files import TokenizerFiles

ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""What the engine computes (common/engine/models/registry.py)."""


@dataclass(frozen=True)
class ModelDir:
    """config: the whole config.json. architecture: the first of ARCHITECTURES that it names.
    vocab_size: rows of the embedding; every token id is below it (the tokenizer may know fewer).
    max_context: prompt and output together, in tokens.
    eos_token_ids: ascending, without doubles; may be empty.
    weight_files: the safetensors files in order; empty if opened without need_weights and there are none.
    special_tokens: by role, e.g. {"eos_token": "</s>"}.
    """

    path: Path
    name: str
    config: dict[str, Any]
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    weight_files: tuple[Path, ...]
    tokenizer: TokenizerFiles

    @classmethod
    def open(cls, path: str | Path, *, need_weights: bool = True, need_tokenizer: bool = True) -> ModelDir:
        """Raises StartError if the folder, or a file in it that is needed, is missing, unreadable or unsupported."""
        if not str(path):
            raise StartError("model path is empty")
        folder = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would trade a symlink's name for its target's
        _check_folder(folder)
        config = read_object(folder / "config.json")
        architecture = _architecture(config, folder)
        if need_tokenizer and not (folder / "tokenizer.json").exists():
            raise StartError(f"model folder {folder} has no tokenizer.json")
        tokenizer = TokenizerFiles.read(folder)
        vocab_size = _positive(config, "vocab_size", folder)
        return cls(
            path=folder,
            name=folder.name,
            config=config,
            architecture=architecture,
            vocab_size=vocab_size,
            max_context=_positive(config, "max_position_embeddings", folder),
            eos_token_ids=_eos_token_ids(config, tokenizer, vocab_size, folder),
            weight_files=_weight_files(folder, needed=need_weights),
            tokenizer=tokenizer,
        )

    @property
    def chat_template(self) -> str | None:
        """Jinja source; None: the model takes no chats."""
        return self.tokenizer.chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        return self.tokenizer.special_tokens

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"


def _check_folder(folder: Path) -> None:
    try:
        is_empty = not any(folder.iterdir())
    except FileNotFoundError:
        raise StartError(f"model path {folder} does not exist") from None
    except NotADirectoryError:
        raise StartError(f"model path {folder} is a file, must be a folder") from None
    except OSError as error:
        raise StartError(f"cannot read model folder {folder}: {error.strerror}") from None
    if is_empty:
        raise StartError(f"model folder {folder} is empty")


def _architecture(config: dict[str, Any], folder: Path) -> str:
    named = config.get("architectures")
    known = [name for name in named if name in ARCHITECTURES] if isinstance(named, list) else []
    if not known:
        raise StartError(f"{folder / 'config.json'}: architecture must be {' or '.join(ARCHITECTURES)}, got {named!r}")
    if config.get("quantization_config") is not None:
        raise StartError(f"{folder / 'config.json'}: quantized weights are not supported (quantization_config is set)")
    return str(known[0])


def _positive(config: dict[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartError(f"{folder / 'config.json'}: {name} must be a positive integer, got {value!r}")
    return value


def _eos_token_ids(config: dict[str, Any], tokenizer: TokenizerFiles, vocab_size: int, folder: Path) -> tuple[int, ...]:
    """generation_config.json's, else config.json's, and the tokenizer's."""
    source, given = "generation_config.json", read_object_if_there(folder / "generation_config.json").get("eos_token_id")
    if given is None:
        source, given = "config.json", config.get("eos_token_id")
    named = [] if given is None else [(token_id, source) for token_id in (given if isinstance(given, list) else [given])]
    text = tokenizer.special_tokens.get("eos_token")
    if text is not None and (folder / "tokenizer.json").exists():
        if tokenizer.eos_id is None:
            raise StartError(f"{folder / 'tokenizer.json'} does not have the eos_token {text!r} that tokenizer_config.json names")
        named.append((tokenizer.eos_id, "tokenizer.json"))
    for token_id, where in named:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise StartError(f"{folder / where}: end token id must be in [0, {vocab_size}), got {token_id!r}")
    return tuple(sorted({token_id for token_id, _ in named}))


def _weight_files(folder: Path, *, needed: bool) -> tuple[Path, ...]:
    """The index's shards, else model.safetensors, else every *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
            raise StartError(f"{index}: weight_map must map tensors to files")
        files = [folder / name for name in sorted(set(shards.values()))]
    else:
        single = folder / "model.safetensors"
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if needed and not files:
        raise StartError(f"model folder {folder} has no *.safetensors weights")
    for file in files if needed else ():
        _check_readable(file)
    return tuple(files)


def _check_readable(file: Path) -> None:
    try:
        file.open("rb").close()
    except FileNotFoundError:
        raise StartError(f"model folder {file.parent} has no {file.name}, which its index names") from None
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from None
