"""Text to token ids and back, by the model's own tokenizer.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import tokenizers

from common.errors import InvalidRequest, StartError
from common.model_dir import ModelDir
from router.text.pieces import PieceTable, piece_table

INLINE_CHARS = 2048
"""Longer texts are encoded in a thread: this many take about half a millisecond."""


CheckLength = Callable[[int], None]
"""Raises if a text may not have so many tokens. Asked before they are listed, which takes longer than to count them."""


def any_length(tokens: int) -> None:
    """A CheckLength."""


class Tokenizer:
    """vocab_size: the model's; ids from the tokenizer's last to there have no text.
    special_ids: the tokens that text leaves out unless asked to include them.
    shown, hidden: what each token adds to a text, with and without special tokens; None if the decoder needs whole texts.
    """

    def __init__(self, model: ModelDir) -> None:
        """Raises StartError naming the file if it is no tokenizer or contradicts the model folder's other files."""
        self._tokenizer = _load(model)
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocab_size = model.vocab_size
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        size = max(model.vocab_size, max(self._tokenizer.get_vocab().values(), default=-1) + 1)
        tokens = [self._tokenizer.id_to_token(token_id) for token_id in range(size)]
        self.shown = piece_table(_decoder_of(self._tokenizer), tokens)
        self.hidden: PieceTable | None = self.shown and self.shown.without(self.special_ids)
        self._adds_nothing = frozenset(token_id for token_id, token in enumerate(tokens) if token is None)
        self._token_text = lru_cache(maxsize=65536)(self._make_token_text)

    def encode(self, text: str, *, add_special: bool = True, check_length: CheckLength = any_length) -> list[int]:
        """add_special: with the start (or end) tokens that the tokenizer adds by default; a rendered chat has its own."""
        try:
            # The batch call, unlike encode(), leaves the GIL to others.
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0]
        except TypeError:
            raise InvalidRequest("prompt", "must be valid Unicode, without lone surrogates", ascii(text)) from None
        check_length(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    async def encode_async(self, text: str, *, add_special: bool = True, check_length: CheckLength = any_length) -> list[int]:
        """As encode; a long text does not hold up the event loop."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special=add_special, check_length=check_length)
        return await asyncio.to_thread(self.encode, text, add_special=add_special, check_length=check_length)

    def decode(self, ids: Sequence[int], *, include_special: bool) -> str:
        """Bytes that are no whole character become U+FFFD. ids: each in [0, vocab_size)."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not include_special)
        return text

    def token_text(self, token_id: int) -> str:
        """The token's own text, special or not; bytes that are no whole character become U+FFFD."""
        return self._token_text(token_id)

    def is_visible(self, token_id: int, *, include_special: bool) -> bool:
        """Whether decode() sees the token at all."""
        return token_id not in self._adds_nothing and (include_special or token_id not in self.special_ids)

    def _make_token_text(self, token_id: int) -> str:
        if self.shown is None:
            return self.decode([token_id], include_special=True)
        piece = self.shown.pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")


def _load(model: ModelDir) -> tokenizers.Tokenizer:
    path = model.tokenizer_file
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise StartError(f"{path} is not a usable tokenizer: {' '.join(str(error).split())}") from None
    # A prompt is never cut or filled silently, whatever the file was last saved with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, model)
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, model: ModelDir) -> None:
    """What tokenizer_config.json says beyond tokenizer.json: more tokens, and which of the known ones are special."""
    for token_id, (text, special) in sorted(model.tokenizer.added_tokens.items()):
        if tokenizer.token_to_id(text) is None:
            tokenizer.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False)])
            if tokenizer.token_to_id(text) != token_id:
                place = tokenizer.token_to_id(text)
                raise StartError(
                    f"{model.path}: tokenizer_config.json adds {text!r} as {token_id}, tokenizer.json has it as {place}"
                )
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    ordinary = [text for text in model.special_tokens.values() if not added.get(text)]
    ordinary += [text for text in model.tokenizer.more_special if text not in added]
    for text in ordinary:
        if tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _decoder_of(tokenizer: tokenizers.Tokenizer) -> Any:
    return None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
