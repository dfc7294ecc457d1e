"""What the router knows of the model it serves: limits, fingerprint, prompts to token ids and ids to text."""

from __future__ import annotations

import asyncio

from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2
from router.request.rules import LengthRule
from router.request.valid_request import LISTED, Limits, Prompt
from router.request.validation import validate_detokenize, validate_tokenize
from router.text.prompts import PromptReader
from router.text.tokenizer import Tokenizer

INLINE_IDS = 4096


class ServedModel:
    """limits: before any worker narrows them."""

    def __init__(self, folder: ModelDir, *, max_context: int | None, max_prompt_tokens: int | None = None) -> None:
        """Raises StartError if the tokenizer or the chat template cannot be used."""
        self.folder = folder
        self.fingerprint = fingerprint(folder)
        self.tokenizer = Tokenizer(folder)
        self.limits = Limits(
            vocab_size=folder.vocab_size,
            max_context=folder.max_context if max_context is None else min(folder.max_context, max_context),
            prompt_cap=max_prompt_tokens,
        )
        self._reader = PromptReader(folder, self.tokenizer)

    @property
    def takes_chats(self) -> bool:
        return self._reader.takes_chats

    async def read(self, prompt: Prompt, *, rule: LengthRule) -> list[int]:
        """The prompt's ids; of a text or a chat their number alone is checked. Raises OutOfRange if they break the rule, and
        FailedPrecondition or InvalidRequest for a chat that cannot be rendered."""
        return await self._reader.ids(prompt, rule=rule)

    async def tokenize(self, pb: generation_pb2.TokenizeRequest) -> list[int]:
        """As Generate would, also what is longer than a prompt may be."""
        return await self.read(validate_tokenize(pb, self.limits), rule=LISTED)

    async def detokenize(self, pb: generation_pb2.DetokenizeRequest) -> str:
        if len(pb.token_ids) <= INLINE_IDS:
            return self._detokenize(pb)
        return await asyncio.to_thread(self._detokenize, pb)

    def _detokenize(self, pb: generation_pb2.DetokenizeRequest) -> str:
        ids = validate_detokenize(pb, self.limits)
        return self.tokenizer.decode(ids, include_special=pb.include_special_tokens)
