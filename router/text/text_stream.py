"""One completion's tokens to the text a client sees: detokenizer, then stop strings.

Which tokens count: all up to and including the one whose text completes a stop string; later ones are dropped. A token that
ends the completion with STOP (an end or stop token) counts and adds no text. A stop string that is complete before the
completion has min_tokens tokens is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.work import FinishReason, TokenOut
from router.request.valid_request import ValidRequest
from router.text.detokenizer import make_detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """What a push adds. tokens_kept: how many of the pushed tokens count. matched_stop: the completion ends
    here with STOP, whatever finish its last token carries."""

    text: str
    tokens_kept: int
    matched_stop: str | None


class TokenText(NamedTuple):
    """A token as a client reads it in logprobs. top: (token id, logprob, text), best first."""

    token_id: int
    logprob: float
    text: str
    top: tuple[tuple[int, float, str], ...]


class TextStream:
    """Push a completion's tokens in order; stop at a matched_stop or a token with a finish. Event loop only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        include_special: bool = False,
        min_tokens: int = 0,
        ids_only: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = None if ids_only else make_detokenizer(tokenizer, include_special=include_special)
        self._stops = StopStrings(stop, include=include_stop) if stop and not ids_only else None
        self._min_tokens = min_tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: ValidRequest) -> TextStream:
        """As the request asks."""
        return cls(
            tokenizer,
            stop=request.stop,
            include_stop=request.include_stop,
            include_special=request.include_special_tokens,
            min_tokens=request.sampling.min_tokens,
            ids_only=request.ids_only,
        )

    def push(self, tokens: Sequence[TokenOut]) -> TextPiece:
        """tokens: at least one. A last token with a finish also brings out everything held."""
        if self._detokenizer is None:
            return TextPiece("", len(tokens), None)
        if self._stops is not None:
            return self._push_searching(tokens, self._stops)
        finish = tokens[-1].finish
        ids = [token.token_id for token in tokens]
        if finish is None:
            return TextPiece(self._detokenizer.push(ids), len(ids), None)
        if finish is FinishReason.STOP:
            ids.pop()
        text = self._detokenizer.push(ids) if ids else ""
        return TextPiece(text + self._detokenizer.flush(), len(tokens), None)

    def finish(self) -> str:
        """What is still held, for a completion that ends without a last token (abort). Empty after a last token."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.flush()
        return text if self._stops is None else self._stops.flush() + text

    def logprobs(self, tokens: Sequence[TokenOut]) -> list[TokenText]:
        """One entry per token that has a logprob. With ids_only the texts are empty."""
        text = self._tokenizer.token_text if self._detokenizer is not None else _no_text
        return [
            TokenText(token.token_id, token.logprob, text(token.token_id), tuple((i, p, text(i)) for i, p in token.top))
            for token in tokens
            if token.logprob is not None
        ]

    def _push_searching(self, tokens: Sequence[TokenOut], stops: StopStrings) -> TextPiece:
        out = []
        for count, token in enumerate(tokens, 1):
            text, matched = self._search(token, stops)
            out.append(text)
            if matched is not None:
                return TextPiece("".join(out), count, matched)
        return TextPiece("".join(out), len(tokens), None)

    def _search(self, token: TokenOut, stops: StopStrings) -> tuple[str, str | None]:
        """The text that one token brings out, and the stop string it completes."""
        assert self._detokenizer is not None
        text = "" if token.finish is FinishReason.STOP else self._detokenizer.push((token.token_id,))
        if token.finish is not None:
            text += self._detokenizer.flush()
        text, matched = stops.push(text, may_end=token.index + 1 >= self._min_tokens)
        if token.finish is not None and matched is None:
            text += stops.flush()
        return text, matched


def _no_text(token_id: int) -> str:
    return ""
