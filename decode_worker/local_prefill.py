"""LocalPrefill: how a prompt that a router sends here (--local-prefill always) gets in line, its turns, and into the batch."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.handle import Emit
from common.errors import FailedPrecondition, Full, InvalidRequest, Leaving, PdserveError
from common.work import TokenOut, WorkFailure
from decode_worker.commands import Prefill
from decode_worker.decoding import Decoding
from decode_worker.events import Failed, StepTokens
from decode_worker.local_prompts import LocalPrompts
from decode_worker.ticket import Ticket
from decode_worker.tickets import Tickets


@dataclass(frozen=True)
class PromptLimits:
    """chunk_tokens: prompt tokens computed in one step. max_prompts: in line or being computed at once."""

    chunk_tokens: int = 256
    max_prompts: int = 10_000


class LocalPrefill:
    """Engine thread only."""

    def __init__(
        self, limits: PromptLimits | None, *, tickets: Tickets, decoding: Decoding, prompts: LocalPrompts, emit: Emit
    ) -> None:
        """limits: None: this worker computes no prompts."""
        self._limits = limits
        self._tickets = tickets
        self._decoding = decoding
        self._prompts = prompts
        self._emit = emit
        self._is_prompts_turn = False

    def take(self, command: Prefill, *, draining: bool) -> None:
        """Puts a prompt in line, or tells its router why not."""
        req = command.req
        try:
            if self._limits is None:
                raise FailedPrecondition("this decode worker computes no prompts: --local-prefill is never")
            if draining:
                raise Leaving("this decode worker is draining")
            if len(self._tickets) >= self._limits.max_prompts:
                raise Full(f"this decode worker has {self._limits.max_prompts} prompts, which is its limit")
            self._tickets.prefill(command, is_running=lambda key: self._decoding.of_key(key) is not None)
        except PdserveError as error:
            retryable = not isinstance(error, InvalidRequest)
            for offset in range(req.n):
                self._emit(Failed(WorkFailure.of(req.key.for_completion(offset), error, retryable=retryable)))

    def launch(self) -> bool:
        """Launches a step of prompts or of the running requests, which take turns: neither waits longer than one step for the
        other. False if there is nothing to launch."""
        if self._is_prompts_turn and self._prompts.launch():
            self._is_prompts_turn = False
            return True
        self._is_prompts_turn = True
        return self._decoding.launch() or self._prompts.launch()

    def run_computed(self, ticket: Ticket, tokens: tuple[TokenOut, ...]) -> None:
        """A prompt has its first tokens: its completions join the others."""
        live = tuple(token for token in tokens if token.key not in ticket.cancelled)
        self._emit(StepTokens(ticket.req.router_epoch, live))
        completions = self._tickets.take(ticket, tokens)
        for completion in completions:
            completion.repeat = None
        self._decoding.add(completions)
