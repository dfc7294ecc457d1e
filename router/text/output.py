"""What of one completion's output has not been written yet: tokens go in, Deltas come out."""

from __future__ import annotations

from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from common.work import FinishReason, TokenOut
from common.work_key import WorkKey
from router.text.text_stream import TextStream, TokenText

ABSORB_TOKENS = 64
"""Tokens a slow reader may leave before their text is made, so that a stop string is found although nothing is read."""
DELTA_TOKENS = 512
"""One Delta begins to be full at, so that none outgrows a client's message limit, whatever its logprobs."""

PLAIN_TOKEN_BYTES = 32
LOGPROB_BYTES = 56
"""What an unread token and each logprob with its text take at most, as measured."""

_NO_KEY = WorkKey(0, 0, 0)


def bytes_per_token(logprobs: int | None) -> int:
    """What keeping a token of output takes. logprobs: as in ValidRequest."""
    return PLAIN_TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES * (logprobs + 1))


class Output:
    """matched_stop: the stop string that was found; tokens pushed after it are dropped.
    count: tokens that belong to the output so far, taken or not.
    """

    def __init__(self, stream: TextStream | None, *, request_id: str, number: int, logprobs: bool) -> None:
        """stream: None for nothing but ids. number: which of the request's completions."""
        assert stream is not None or not logprobs, "logprobs come from the stream"
        self.request_id = request_id
        self._number = number
        self.matched_stop: str | None = None
        self.count = 0
        self._stream = stream
        self._wants_logprobs = logprobs
        self._raw: list[TokenOut] = []
        self._responses: list[generation_pb2.GenerateResponse] = []

    def push(self, token: work_pb2.Token) -> None:
        """The next token in order."""
        if self._stream is None:
            self._open_delta().token_ids.append(token.token_id)
            self.count += 1
            return
        self._raw.append(self._from_pb(token))
        if len(self._raw) >= ABSORB_TOKENS:
            self._absorb(self._stream)

    def take(self, *, ended: bool) -> list[generation_pb2.GenerateResponse]:
        """Everything not yet taken, in order, each with a delta. ended: no more will come, so held-back text comes out too."""
        if self._stream is not None:
            self._absorb(self._stream)
            if ended and self.matched_stop is None and (held := self._stream.finish()):
                self._open_delta().text += held
        responses, self._responses = self._responses, []
        return responses

    def _absorb(self, stream: TextStream) -> None:
        """Makes text and logprobs of what was pushed."""
        if not self._raw:
            return
        raw, self._raw = self._raw, []
        if self.matched_stop is not None:
            return
        piece = stream.push(raw)
        self.matched_stop = piece.matched_stop
        if piece.tokens_kept < len(raw):
            raw = raw[: piece.tokens_kept]
        self.count += len(raw)
        delta = self._open_delta()
        if piece.text:
            delta.text += piece.text
        for token in raw:
            delta.token_ids.append(token.token_id)
        if self._wants_logprobs:
            delta.logprobs.extend(map(_to_pb, stream.logprobs(raw)))

    def _open_delta(self) -> generation_pb2.Delta:
        """The one to add to, made in its place: as a part given to a constructor it would be copied."""
        if self._responses and len((delta := self._responses[-1].delta).token_ids) < DELTA_TOKENS:
            return delta
        self._responses.append(generation_pb2.GenerateResponse(request_id=self.request_id, index=self._number))
        return self._responses[-1].delta

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
