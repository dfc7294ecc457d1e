"""Soak: sends the wishes, hurts the fleet, and judges."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from tokenizers import Tokenizer

from bench.fleet.faults import Faults
from bench.fleet.fleet import Fleet
from bench.soak.wishes import Wish
from common.engine.sim.tokens import SimVocabulary
from tests.helpers.client import Answer, Client

CALL_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 60.0
"""How long after the last answer every page may take to be back: leases of what was killed run out in it."""
LOOK_SECONDS: Final = 0.2


@dataclass
class Verdict:
    """wrong: what each wrong answer said. failed: gRPC statuses. attempts: more than one each."""

    asked: int = 0
    right: int = 0
    cancelled: int = 0
    tokens: int = 0
    attempts: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    leaks: str = ""


class Soak:
    """Event loop only."""

    def __init__(
        self, client: Client, fleet: Fleet, *, vocabulary: SimVocabulary, words: Tokenizer, faults: Faults, concurrency: int
    ) -> None:
        """words: the model's tokenizer, which knows each answer's text."""
        self._client = client
        self._fleet = fleet
        self._vocabulary = vocabulary
        self._words = words
        self._faults = faults
        self._concurrency = concurrency
        self.verdict = Verdict()

    async def run(self, wishes: Iterator[Wish]) -> Verdict:
        """A closed loop: the next wish comes when an answer has. Then everything comes to rest."""
        start = time.monotonic()
        await asyncio.gather(*(self._ask_all(wishes) for _ in range(self._concurrency)))
        self.verdict.seconds = time.monotonic() - start
        self.verdict.leaks = await self._leaks()
        return self.verdict

    async def _ask_all(self, wishes: Iterator[Wish]) -> None:
        for wish in wishes:
            if wish.hurts:
                await self._hurt()
            await self._ask(wish)

    async def _hurt(self) -> None:
        order = self._faults.next()
        self.verdict.faults[order.what] += 1
        await self._fleet.order(str(order))

    async def _ask(self, wish: Wish) -> None:
        verdict, answer = self.verdict, Answer()
        verdict.asked += 1
        try:
            whole = await self._read(wish, answer)
        except grpc.aio.AioRpcError as error:
            verdict.failed[f"{error.code().name}: {error.details()}"] += 1
            return
        except AssertionError as error:  # Events in an order that the API does not allow.
            verdict.wrong.append(f"prompt of {len(wish.prompt)}: {error}")
            return
        if why := what_is_wrong(wish, answer, vocabulary=self._vocabulary, words=self._words, whole=whole):
            verdict.wrong.append(why)
        elif whole:
            self._count(answer)
        else:
            verdict.cancelled += 1

    async def _read(self, wish: Wish, answer: Answer) -> bool:
        """Whether the answer came to its end before the client went away."""
        sampling = {"max_tokens": wish.tokens, "ignore_eos": True, "temperature": wish.sampling.temperature}
        if wish.sampling.seed is not None:
            sampling["seed"] = wish.sampling.seed
        call = self._client.call(wish.prompt, sampling=sampling, n=wish.n, timeout=CALL_SECONDS)
        events = 0
        async for event in call:
            answer.add(event)
            events += 1
            if wish.cancel_after is not None and events > wish.cancel_after:
                call.cancel()
                return False
        return True

    def _count(self, answer: Answer) -> None:
        verdict, end = self.verdict, answer.completions[0].end
        verdict.right += 1
        verdict.tokens += sum(len(completion.ids) for completion in answer.completions.values())
        verdict.attempts += end.timing.attempts > 1
        verdict.prompt_tokens += end.usage.prompt_tokens
        verdict.cached_tokens += end.usage.cached_tokens

    async def _leaks(self) -> str:
        """What is not as it was at the start, once caches are flushed; empty if all is."""
        if why := await self._until_idle():
            return why
        await self._client.flush()
        return await self._until_idle(cached=False)

    async def _until_idle(self, *, cached: bool = True) -> str:
        for _ in range(int(IDLE_SECONDS / LOOK_SECONDS)):
            if not (why := await self._busy(cached=cached)):
                break
            await asyncio.sleep(LOOK_SECONDS)
        return why

    async def _busy(self, *, cached: bool = True) -> str:
        workers = await self._client.workers()
        expected = self._fleet.plan.prefill + self._fleet.plan.decode
        if len(workers) != expected:
            return f"{len(workers)} of {expected} workers are registered"
        for worker in workers.values():
            held: dict[str, Any] = {
                "running": worker.running,
                "waiting": worker.waiting,
                "held": worker.held_pages,
                "quarantined": worker.quarantined_pages,
                "lost": worker.total_pages - worker.free_pages - worker.cached_pages,
                "cached": 0 if cached else worker.cached_pages,
            }
            if any(held.values()):
                return f"{worker.id}: {', '.join(f'{count} {what}' for what, count in held.items() if count)}"
        return ""


def what_is_wrong(wish: Wish, answer: Answer, *, vocabulary: SimVocabulary, words: Tokenizer, whole: bool) -> str:
    """Empty if nothing is. Of an answer that is not whole its beginning counts."""
    if whole and len(answer.completions) != wish.n:
        return f"{len(answer.completions)} of {wish.n} completions"
    for which, completion in answer.completions.items():
        expected, found = wish.answer(which, vocabulary), completion.ids
        if found != (expected if whole else expected[: len(found)]):
            at = _first_difference(found, expected)
            return f"completion {which}: {len(found)} of {len(expected)} tokens, wrong from {at}"
        if whole and completion.text != words.decode(expected):
            return f"completion {which}: its text is not that of its tokens"
    return ""


def _first_difference(found: list[int], expected: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
