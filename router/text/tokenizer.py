"""Text to token ids and back, by the model's own tokenizer.json."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import tokenizers

from common.errors import InvalidRequest, StartError
from common.model_dir import ModelDir
from router.request.rules import SHOWN, LengthRule
from router.text.pieces import PieceTable, piece_table

INLINE_CHARS = 2048
"""Longer texts are encoded in a thread: this many take about half a millisecond."""
LONG_CHARS = 1 << 18
"""Longer ones are encoded one at a time: a character may take 200 bytes meanwhile."""


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
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
        self._token_text = lru_cache(maxsize=65536)(self._make_token_text)

    def encode(self, text: str, *, add_special: bool = True, rule: LengthRule | None = None) -> list[int]:
        """add_special: with the start (or end) tokens that the tokenizer adds by default; a rendered chat has its own.
        Raises OutOfRange if the rule allows no so many tokens, before they are listed, which takes longer than to count them."""
        if rule is not None:
            self._check_beginnings(text, rule)
        encoding = self._encode(text, add_special)
        if rule is not None:
            rule.check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    async def encode_async(self, text: str, *, add_special: bool = True, rule: LengthRule | None = None) -> list[int]:
        """As encode; a long text does not hold up the event loop."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special=add_special, rule=rule)
        encode = partial(self.encode, text, add_special=add_special, rule=rule)
        thread = self._long_texts if len(text) > LONG_CHARS else None
        return await asyncio.get_running_loop().run_in_executor(thread, encode)

    def _check_beginnings(self, text: str, rule: LengthRule) -> None:
        """Refuses a text far beyond the rule by as much of it as is needed for that, whatever it would take as a whole. At twice
        the rule: where a text is cut, its tokens may be others than they are in the whole."""
        chars = 2 * rule.most + 1
        while 2 * chars < len(text):
            if (count := len(self._encode(text[:chars], False))) > 2 * rule.most:
                raise rule.broken_by(count, chars=chars, of=len(text))
            chars *= 2

    def _encode(self, text: str, add_special: bool) -> tokenizers.Encoding:
        try:
            # The batch call, unlike encode(), leaves the GIL to others.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0]
        except TypeError:
            raise InvalidRequest("prompt", "must be valid Unicode, without lone surrogates", ascii(text[:SHOWN])) from None

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
