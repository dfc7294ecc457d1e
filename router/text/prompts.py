"""A checked prompt of any form to token ids, the same for Generate and Tokenize."""

from __future__ import annotations

import asyncio
from typing import assert_never

from common.errors import FailedPrecondition
from common.model_dir import ModelDir
from router.request.rules import LengthRule
from router.request.valid_request import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import INLINE_CHARS, Tokenizer


class PromptReader:
    """Text is tokenized with the special tokens that the tokenizer adds; a chat has those that its template writes."""

    def __init__(self, model: ModelDir, tokenizer: Tokenizer) -> None:
        """Raises StartError if the model's chat template does not compile."""
        self._tokenizer = tokenizer
        self._template = None if model.chat_template is None else ChatTemplate(model.chat_template, model.special_tokens)

    @property
    def takes_chats(self) -> bool:
        return self._template is not None

    async def ids(self, prompt: Prompt, *, rule: LengthRule | None = None) -> list[int]:
        """Long work is done in a thread. rule: for what is tokenized here. Raises OutOfRange if that breaks it,
        FailedPrecondition for a chat if the model has no template, InvalidRequest if the template refuses the messages."""
        match prompt:
            case IdsPrompt(ids):
                return ids
            case TextPrompt(text):
                return await self._tokenizer.encode_async(text, rule=rule)
            case ChatPrompt():
                text = await self.render(prompt)
                return await self._tokenizer.encode_async(text, add_special=False, rule=rule)
            case _:
                assert_never(prompt)

    async def render(self, prompt: ChatPrompt) -> str:
        """The chat as the text that is tokenized."""
        if self._template is None:
            raise FailedPrecondition("this model has no chat template: send text or token_ids instead of chat")
        size = sum(64 + len(message["content"]) for message in prompt.messages)
        if size <= INLINE_CHARS and not prompt.kwargs:
            return self._template.render(prompt.messages, prompt.kwargs)
        return await asyncio.to_thread(self._template.render, prompt.messages, prompt.kwargs)
