"""What clients see while something dies: every answer's timeline, checked against the model."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from bench.serving.figures import percentile
from tests.helpers import reference
from tests.helpers.client import Client, request

ORDINARY = 380
"""Token ids below it are ordinary in the tests' models."""


@dataclass
class Timeline:
    """One request. times: when it was sent and when each of its events came, time.monotonic() seconds. error: empty if it ended
    well. attempts: of the router."""

    prompt: list[int]
    max_tokens: int
    times: list[float] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    error: str = ""
    attempts: int = 1

    @property
    def longest_pause(self) -> float:
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def pause_over(self, moment: float) -> float | None:
        """From the moment until its next event, if it was under way then."""
        if not self.times[0] <= moment < self.times[-1]:
            return None
        return next(at for at in self.times if at > moment) - moment

    def is_right(self, model: Path) -> bool:
        return len(self.output) == self.max_tokens and reference.best(model, self.prompt, self.output) == self.output


@dataclass(frozen=True)
class Load:
    """requests, each of a random prompt and length, at_once of them at a time."""

    requests: int
    at_once: int
    prompt_tokens: tuple[int, int] = (16, 256)
    output_tokens: tuple[int, int] = (32, 128)
    timeout_seconds: float = 120.0

    async def run(self, clients: Sequence[Client], rng: random.Random, *, at: int, then: Callable[[], None]) -> list[Timeline]:
        """then() is called when request number `at` is sent. A call that ends UNAVAILABLE before it said anything goes to the
        next client, as from a client that knows several routers; with one it waits until that one is reached."""
        left = [self._draw(rng) for _ in range(self.requests)]
        done: list[Timeline] = []

        async def loop() -> None:
            while left:
                timeline = left.pop()
                if self.requests - len(left) == at:
                    then()
                await self._send(timeline, clients)
                done.append(timeline)

        await asyncio.gather(*(loop() for _ in range(self.at_once)))
        return done

    def _draw(self, rng: random.Random) -> Timeline:
        prompt = [rng.randrange(ORDINARY) for _ in range(rng.randint(*self.prompt_tokens))]
        return Timeline(prompt, rng.randint(*self.output_tokens))

    async def _send(self, timeline: Timeline, clients: Sequence[Client]) -> None:
        timeline.times.append(time.monotonic())
        for client in clients:
            try:
                await self._read(timeline, client, waits=len(clients) == 1)
                timeline.error = ""
            except grpc.aio.AioRpcError as error:
                timeline.error = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAVAILABLE and not timeline.output:
                    continue
            break
        timeline.times.append(time.monotonic())

    async def _read(self, timeline: Timeline, client: Client, *, waits: bool) -> None:
        message = request(timeline.prompt, sampling={"max_tokens": timeline.max_tokens, "ignore_eos": True})
        async for event in client.stub.Generate(message, timeout=self.timeout_seconds, wait_for_ready=waits):
            timeline.times.append(time.monotonic())
            timeline.output += event.delta.token_ids
            if event.WhichOneof("event") == "finished":
                timeline.attempts = event.finished.timing.attempts


@dataclass(frozen=True)
class Outcome:
    """What a scenario came to. pauses: seconds from the kill to the next event of each request that was under way and ended well,
    rising. longest_pause: of any request that did, at any time. recovery: seconds from the kill until they all had gone on and a
    request sent after it had its first token; None if none that was ended well."""

    name: str
    requests: int
    failed: list[str]
    wrong: int
    retried: int
    pauses: list[float]
    longest_pause: float
    recovery: float | None

    @classmethod
    def of(cls, name: str, timelines: Sequence[Timeline], *, killed: float, model: Path) -> Outcome:
        ended = [timeline for timeline in timelines if not timeline.error]
        pauses = sorted(pause for timeline in ended if (pause := timeline.pause_over(killed)) is not None)
        first_after = min((timeline.times[1] - killed for timeline in ended if timeline.times[0] > killed), default=None)
        return cls(
            name,
            len(timelines),
            [timeline.error for timeline in timelines if timeline.error],
            sum(not timeline.is_right(model) for timeline in ended),
            sum(timeline.attempts > 1 for timeline in timelines),
            pauses,
            max((timeline.longest_pause for timeline in ended), default=0.0),
            None if first_after is None else max(first_after, *pauses, 0.0),
        )

    def row(self) -> str:
        p50, p99 = (f"{percentile(self.pauses, percent):.2f} s" if self.pauses else "-" for percent in (50, 99))
        recovery = "never" if self.recovery is None else f"{self.recovery:.2f} s"
        return (
            f"| {self.name} | {self.requests} | {len(self.failed)} | {self.wrong} | {self.retried} | {len(self.pauses)} "
            f"| {p50} | {p99} | {self.longest_pause:.2f} s | {recovery} |"
        )


HEAD = (
    "| killed | requests | failed | wrong | retried | went on | pause p50 | pause p99 | longest pause | recovery |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
