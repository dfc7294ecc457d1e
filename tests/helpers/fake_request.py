"""One completion on a fake worker. Its next token is a function of the whole history, so that a lost or doubled one shows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from common.wire import ids_from_bytes, ids_to_bytes, key_from_pb
from common.work_key import WorkKey

LETTERS = 94
"""Fake tokens are in [0, LETTERS): printable one-character tokens of the byte-level test models."""


def next_token(ids: Sequence[int], completion: int = 0) -> int:
    return zlib.crc32(ids_to_bytes(ids), completion) % LETTERS


def expected_output(prompt: Sequence[int], count: int, completion: int = 0) -> list[int]:
    """The first count tokens after prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, completion))
    return ids[len(prompt) :]


@dataclass
class FakeRequest:
    """One completion on a fake worker."""

    key: WorkKey
    ids: list[int]
    prompt_len: int
    left: int
    completion: int
    sampling: generation_pb2.SamplingParams
    logprobs: bool
    is_new: bool = True

    @classmethod
    def all_of(cls, req: work_pb2.Req) -> list[FakeRequest]:
        key = key_from_pb(req.key)
        return [
            cls(
                key=key.for_completion(i),
                ids=list(ids_from_bytes(req.input_ids)),
                prompt_len=req.prompt_len,
                left=req.output_len,
                completion=req.completion + i,
                sampling=req.sampling,
                logprobs=req.HasField("logprobs"),
            )
            for i in range(max(1, req.n))
        ]

    def make_token(self) -> work_pb2.Token:
        token_id = next_token(self.ids, self.completion)
        index = len(self.ids) - self.prompt_len
        self.ids.append(token_id)
        self.left -= 1
        token = work_pb2.Token(uid=self.key.uid, attempt=self.key.attempt, index=index, token_id=token_id)
        if self.logprobs:
            token.logprob = -token_id / 100
            token.top_ids.extend([token_id, (token_id + 1) % LETTERS])
            token.top_logprobs.extend([-token_id / 100, -2.0])
        if token_id in self.sampling.stop_token_ids:
            token.finish = generation_pb2.FINISH_REASON_STOP
        elif self.left == 0:
            token.finish = generation_pb2.FINISH_REASON_LENGTH
        return token
