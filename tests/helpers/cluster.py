"""A cluster of real processes on loopback: start, talk to, pause, kill, and check that nothing leaked."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers.client import Client
from tests.helpers.eventually import SLACK, eventually
from tests.helpers.process import START_SECONDS, Process, free_port

PATIENCE = "20s"
"""How long a peer may be silent in tests of something else: on a machine whose cores are all taken one can be for the default."""


class Cluster:
    """A router with prefill and decode workers of one model."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        worker_args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        router_args: Sequence[str] = (),
        start_seconds: float = START_SECONDS,
        listen: str = "",
        worker_listen: str = "127.0.0.1:0",
        connect: Callable[[str], Client] = Client,
        is_awaited: bool = True,
        patience: str = PATIENCE,
    ) -> None:
        """listen: the router's address; empty: a free port. worker_listen: of workers that are told no other. connect: makes
        client(). is_awaited: `with` waits until the router is ready, for which it must have a pair. patience: with silent peers;
        empty: the default, for tests in which somebody is stopped or cut off."""
        self.folder, self.model = folder, model
        self.start_seconds = start_seconds
        self.address = listen or f"127.0.0.1:{free_port()}"
        self._worker_listen, self._connect, self._is_awaited = worker_listen, connect, is_awaited
        silence = ["--peer-silence", patience] if patience else []
        worker_silence = ["--worker-silence", patience] if patience else []
        self.router_args = ["--listen", self.address, "--model", str(model), *silence, *worker_silence, *router_args]
        shared = ["--model", str(model), "--router", self.address, "--threads", "1", *worker_args]
        self.worker_args = {"prefill": [*shared, *silence, *prefill_args], "decode": [*shared, *decode_args]}
        self.router: Process
        self.prefill: list[Process] = []
        self.decode: list[Process] = []
        self._counts = {"prefill": prefill, "decode": decode}
        self._started = 0

    def __enter__(self) -> Cluster:
        try:
            self.start_router()
            for role, count in self._counts.items():
                for _ in range(count):
                    self.start_worker(role)
            for worker in (*self.prefill, *self.decode):
                self.wait_until_joined(worker)
            # Without a pair it is not going to be ready.
            is_ready = self._is_awaited and (self.prefill or self.decode)
            self.router.wait_for_line("router ready on" if is_ready else "listening on", within=self.start_seconds)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_router(self) -> Process:
        self.router = self._start("router", self.router_args)
        return self.router

    def start_router_at(self, address: str) -> Process:
        """One more, told the same; whoever starts it ends it."""
        return self._start("router", [address if arg == self.address else arg for arg in self.router_args])

    def start_worker(self, role: str, *, listen: str = "", router: str = "", extra: Sequence[str] = ()) -> Process:
        """router: instead of the cluster's own address."""
        args = [router or arg if arg == self.address else arg for arg in self.worker_args[role]]
        process = self._start(f"{role}_worker", [*args, "--listen", listen or self._worker_listen, *extra])
        self.processes_of(role).append(process)
        return process

    def wait_until_joined(self, worker: Process) -> None:
        """Until this cluster's router gives it work."""
        worker.wait_for_line("registered with router", within=self.start_seconds)
        address = worker.wait_for_line(r"worker ready on (\S+)$", within=self.start_seconds)[1]
        if "--advertise" in worker.args:
            address = worker.args[worker.args.index("--advertise") + 1]
        registered = rf"worker (\S+) at {re.escape(address)} registered"
        self.router.wait_for_line(registered, within=self.start_seconds)
        # There may have been others at this address.
        worker_id = re.findall(registered, self.router.output)[-1]
        self.router.wait_for_line(rf"session with .*{worker_id} .*stands", within=self.start_seconds)

    def processes_of(self, role: str) -> list[Process]:
        """The list itself: who ends one on purpose takes it out."""
        return self.prefill if role == "prefill" else self.decode

    async def workers_by_id(self, client: Client) -> dict[str, Process]:
        """Which process is the worker of that id, of those that are registered."""
        return {
            worker.id: process
            for worker in (await client.workers()).values()
            for process in (*self.prefill, *self.decode)
            if f"ready on {worker.address}\n" in process.output
        }

    @property
    def processes(self) -> list[Process]:
        return [process for process in (getattr(self, "router", None), *self.prefill, *self.decode) if process is not None]

    def client(self) -> Client:
        return self._connect(self.address)

    def close(self) -> None:
        """Asks everybody to stop, then makes them."""
        for process in self.processes:
            if process.is_alive:
                process.resume()
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        for process in self.processes:
            try:
                process.wait(within=max(0.1, deadline - time.monotonic()))
            except AssertionError:
                process.kill()

    async def assert_idle(self, client: Client, *, within: float = 3.0) -> None:
        """Nothing runs, waits, is held or quarantined on any live worker, every page is free or cached, nobody crashed."""

        async def idle() -> bool:
            workers = await client.workers()
            assert workers, "no worker is registered"
            for worker in workers.values():
                busy = (worker.running, worker.waiting, worker.held_pages, worker.quarantined_pages)
                assert busy == (0, 0, 0, 0), f"{worker.id}: running, waiting, held, quarantined = {busy}"
                assert worker.free_pages + worker.cached_pages == worker.total_pages, f"pages are lost on {worker.id}: {worker}"
            return True

        await eventually(idle, within=within)
        for process in self.processes:
            assert "Traceback" not in process.output, f"{process.module}:\n{process.output[-4000:]}"

    async def capacity_probe(self, client: Client, *, within: float = 10.0) -> None:
        """Idle again with every page accounted for, and a request that needs all of a worker's pages succeeds, twice."""
        await self.assert_idle(client, within=within)
        model = await client.model()
        workers = (await client.workers()).values()
        room = min(min(worker.total_pages for worker in workers) * model.page_size, model.max_context)
        for first in (1, 2):
            ids = [(first + i) % 200 for i in range(room - 2)]
            answer = await client.generate(ids, sampling={"max_tokens": 2, "ignore_eos": True}, timeout=SLACK * within)
            assert len(answer.ids) == 2
        await self.assert_idle(client)

    def _start(self, module: str, args: Sequence[str]) -> Process:
        self._started += 1
        return Process(module, args, log=self.folder / f"{self._started:02}-{module}.log")
