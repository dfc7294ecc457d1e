"""What of one completion's output has not been written yet: tokens go in, Deltas come out."""

from __future__ import annotations

from array import array

from common.core import WorkKey
from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from common.work import FinishReason, TokenOut
from router.text_stream import TextStream, TokenText

ABSORB_TOKENS = 64
"""Tokens a slow reader may leave before their text is made, so that a stop string is found although nothing is read."""

_NO_KEY = WorkKey(0, 0, 0)


class Output:
    """matched_stop: the stop string that was found; tokens pushed after it are dropped.
    count: tokens that belong to the output so far, taken or not.
    """

    def __init__(self, stream: TextStream | None, *, logprobs: bool) -> None:
        """stream: None for nothing but ids."""
        assert stream is not None or not logprobs, "logprobs come from the stream"
        self.matched_stop: str | None = None
        self.count = 0
        self._stream = stream
        self._wants_logprobs = logprobs
        self._raw: list[TokenOut] = []
        self._text = ""
        self._ids = array("I")
        self._logprobs: list[TokenText] = []

    def push(self, token: work_pb2.Token) -> None:
        """The next token in order."""
        if self._stream is None:
            self._ids.append(token.token_id)
            self.count += 1
            return
        self._raw.append(self._from_pb(token))
        if len(self._raw) >= ABSORB_TOKENS:
            self.absorb()

    def absorb(self) -> None:
        """Makes text and logprobs of what was pushed; after it matched_stop and count are up to date."""
        if not self._raw or self._stream is None:
            return
        raw, self._raw = self._raw, []
        if self.matched_stop is not None:
            return
        piece = self._stream.push(raw)
        self._text += piece.text
        self.matched_stop = piece.matched_stop
        if piece.tokens_kept < len(raw):
            raw = raw[: piece.tokens_kept]
        self.count += len(raw)
        self._ids.extend([token.token_id for token in raw])
        if self._wants_logprobs:
            self._logprobs += self._stream.logprobs(raw)

    def take(self, *, ended: bool) -> generation_pb2.Delta | None:
        """Everything not yet taken, None if that is nothing. ended: no more will come, so held-back text comes out too."""
        self.absorb()
        if ended and self._stream is not None and self.matched_stop is None:
            self._text += self._stream.finish()
        if not self._ids and not self._text:
            return None
        delta = generation_pb2.Delta(text=self._text, token_ids=self._ids)
        if self._logprobs:
            delta.logprobs.extend(map(_to_pb, self._logprobs))
            self._logprobs = []
        self._text, self._ids = "", array("I")
        return delta

    def _from_pb(self, token: work_pb2.Token) -> TokenOut:
        """A plain copy: a part of a protobuf message would keep its whole step alive."""
        finish = FinishReason(token.finish) if token.finish else None
        if not self._wants_logprobs:
            return TokenOut(_NO_KEY, token.index, token.token_id, finish=finish)
        top = tuple(zip(token.top_ids, token.top_logprobs, strict=True))
        return TokenOut(_NO_KEY, token.index, token.token_id, token.logprob, top, finish)


def _to_pb(token: TokenText) -> generation_pb2.TokenLogprob:
    top = [generation_pb2.TokenLogprob(token_id=i, logprob=logprob, text=text) for i, logprob, text in token.top]
    return generation_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, text=token.text, top=top)
