"""What a model folder says about its tokenizer besides the vocabulary: special tokens, added tokens, chat template.

Publishers write the same thing in several forms. Each is read here once: a special token is a string or a map with its
"content" (null: none), the template is a file of its own, a string, or a list of named ones of which "default" counts.
A form nobody knows stops the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import StartError
from common.json_files import read_object, read_object_if_there, read_text


@dataclass(frozen=True)
class TokenizerFiles:
    """special_tokens: by role, e.g. {"eos_token": "</s>"}; a role nobody fills is absent.
    added_tokens: the config's own list of id -> (text, is special), which tokenizer.json may lack.
    ids: the ids of the special tokens' texts, as far as the vocabulary has them.
    """

    special_tokens: dict[str, str]
    more_special: tuple[str, ...]
    added_tokens: dict[int, tuple[str, bool]]
    ids: dict[str, int]
    chat_template: str | None

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Raises StartError naming the file and the field that cannot be read. A missing tokenizer.json counts as empty."""
        path = folder / "tokenizer_config.json"
        config = read_object_if_there(path)
        special = _special_tokens(read_object_if_there(folder / "special_tokens_map.json"), folder / "special_tokens_map.json")
        special |= _special_tokens(config, path)
        added = _added_tokens(config.get("added_tokens_decoder"), path)
        vocabulary = folder / "tokenizer.json"
        ids = {text: index for index, (text, _) in added.items()}
        if vocabulary.exists():
            ids |= _ids_of(set(special.values()), read_object(vocabulary), vocabulary)
        return cls(special, _more_special(config, path), added, ids, _chat_template(folder, config))

    @property
    def eos_id(self) -> int | None:
        """None when no end token is named. (StartError when one is named that no vocabulary file has: see ModelDir.)"""
        return self.ids.get(self.special_tokens.get("eos_token", ""))


def _special_tokens(source: dict[str, Any], path: Path) -> dict[str, str]:
    """Every "..._token"; "add_bos_token" and the like are switches."""
    named = {name: token for name, token in source.items() if name.endswith("_token") and not isinstance(token, bool)}
    return {name: _text_of(token, f"{path}: {name}") for name, token in named.items() if token is not None}


def _more_special(config: dict[str, Any], path: Path) -> tuple[str, ...]:
    """A list of tokens, or a map of named ones, under either of two names."""
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(name) or []
        if not isinstance(tokens, (list, dict)):
            raise StartError(f"{path}: {name} must be a list or a map of tokens, got {tokens!r}")
        found += [_text_of(token, f"{path}: {name}") for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    return tuple(found)


def _text_of(token: Any, where: str) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise StartError(f'{where} must be a string or a map with a string "content", got {token!r}')
    return text


def _added_tokens(entries: Any, path: Path) -> dict[int, tuple[str, bool]]:
    """{"5": {"content": "<x>", "special": true}} or {"5": "<x>"} -> {5: ("<x>", True)}."""
    added: dict[int, tuple[str, bool]] = {}
    try:
        for key, entry in (entries or {}).items():
            text, special = (entry, True) if isinstance(entry, str) else (entry["content"], bool(entry.get("special", False)))
            if not isinstance(text, str):
                raise TypeError
            added[int(key)] = (text, special)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StartError(f'{path}: added_tokens_decoder must map token ids to maps with a string "content"') from None
    return added


def _ids_of(texts: set[str], tokenizer: dict[str, Any], path: Path) -> dict[str, int]:
    """The ids tokenizer.json gives these texts; added tokens go before the vocabulary. Unigram's vocabulary is a list."""
    try:
        vocab = tokenizer["model"]["vocab"]
        if isinstance(vocab, list):
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        ids = {text: int(vocab[text]) for text in texts if text in vocab}
        added = {entry["content"]: int(entry["id"]) for entry in tokenizer.get("added_tokens") or ()}
        return ids | {text: added[text] for text in texts if text in added}
    except (KeyError, TypeError, ValueError, IndexError):
        raise StartError(f"{path} is not a tokenizer file: its vocabulary or added tokens cannot be read") from None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (KeyError, TypeError):
            template = 0  # falls to the check below
    if template is not None and not isinstance(template, str):
        raise StartError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of named strings")
    return template
