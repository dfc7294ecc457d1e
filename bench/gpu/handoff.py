"""Line 4: handing a prompt's KV to another GPU.

storing   prefill that stores into the other GPU's pool as it goes, beside prefill alone
bulk      pages copied at once (a prefix cached at the prefill worker), beside a large copy between the two GPUs
exposed   of a running cluster: from the prompt's last chunk having been computed until the request may run, as the decode
          worker's histogram pdserve_handoff_exposed_seconds says; and what the client sees: how much later token 1 comes
"""

from __future__ import annotations

import socket
import statistics
import time
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from bench.gpu.ceilings import median_seconds
from bench.gpu.engine import Engine, prefill_req
from bench.serving.bench import Bench, Sampling
from bench.serving.shots import Shot
from bench.serving.systems import Deployment, local_model
from common.core import Batch, Req
from common.engine.cuda import kernels
from common.engine.pages import pages_for
from common.engine.peer_store import PeerStore

LENGTHS = (128, 512, 2048, 8192, 32768)
BULK_PAGES = (1, 8, 64, 512)
COPY_BYTES = 256 << 20
SHOTS = 6
WARM_UP = 2
METRIC = "pdserve_handoff_exposed_seconds"


def storing_rows(engine: Engine) -> list[dict[str, object]]:
    pool = engine.runner.pool
    peer = torch.empty(
        (pages_for(max(LENGTHS), pool.page_size), *pool.tensor.shape[1:]), dtype=pool.tensor.dtype, device="cuda:1"
    )
    peer[:1].copy_(pool.tensor[:1])  # Torch maps the other GPU's memory at the first copy.
    rows: list[dict[str, object]] = []
    for length in LENGTHS:
        with prefill_req(engine, length) as req:
            store = PeerStore(peer.data_ptr(), tuple(range(pages_for(length, pool.page_size))), 0)
            alone = median_seconds(partial(_prefill, engine, req, {}), repeat=7)
            storing = median_seconds(partial(_prefill, engine, req, {req: store}), repeat=7)
        rows.append(
            {
                "model": engine.name,
                "tokens": length,
                "alone ms": alone * 1e3,
                "storing ms": storing * 1e3,
                "slow-down %": (storing / alone - 1) * 100,
            }
        )
    return rows


def bulk_rows(engine: Engine) -> list[dict[str, object]]:
    pool = engine.runner.pool.tensor
    peer = torch.empty((max(BULK_PAGES), *pool.shape[1:]), dtype=pool.dtype, device="cuda:1")
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:0").random_()
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:1")
    ceiling = COPY_BYTES / median_seconds(lambda: target.copy_(source), repeat=9)
    rows: list[dict[str, object]] = []
    for count in BULK_PAGES:
        pages = torch.randperm(len(pool) - 1, device="cuda:0")[:count].int()
        to = torch.arange(count, dtype=torch.int32, device="cuda:0")
        seconds = median_seconds(partial(kernels.copy_pages, pool, pages, peer.data_ptr(), to), repeat=9)
        rate = count * pool[0].nbytes / seconds
        rows.append(
            {
                "model": engine.name,
                "pages": count,
                "MiB": count * pool[0].nbytes / 2**20,
                "us": seconds * 1e6,
                "GB/s": rate / 1e9,
                "% of copy": 100 * rate / ceiling,
            }
        )
    return rows


def _prefill(engine: Engine, req: Req, stores: Mapping[Req, PeerStore]) -> None:
    """All of the prompt, in chunks; the request is as before afterwards."""
    while True:
        req.take_chunk(engine.chunk_tokens)
        engine.runner.launch(Batch([req], "prefill"), stores)
        if req.is_last_chunk:
            req.cached_len = 0
            return
        req.complete_chunk()


def exposed_rows(model: str, out: Path) -> list[dict[str, object]]:
    """One request at a time through a split cluster on two GPUs."""
    path, options = local_model(model, out / "models")
    port = _free_port()
    deployment = Deployment(
        model=path, device="cuda", decode_args=f"--metrics-port {port}", options=(*options, "--max-context", "33024")
    )
    system = deployment.split()
    rows: list[dict[str, object]] = []
    with system.running(out / "logs") as router:
        bench = Bench(system.name, router, 0, Sampling(), 1, drain=60.0, timeout=60.0)
        for length in LENGTHS:
            spacing = 0.3 + length / 16384
            bench.shoot([Shot(i * spacing, length, 16) for i in range(WARM_UP)])
            before = _exposed(port)
            records = bench.shoot([Shot(i * spacing, length, 16) for i in range(SHOTS)]).records
            count, total = (now - then for now, then in zip(_exposed(port), before, strict=True))
            gaps = [list(record.gaps()) for record in records]
            later = statistics.median(gap for own in gaps for gap in own[1:])
            rows.append(
                {
                    "model": model,
                    "tokens": length,
                    "handed over": count,
                    "exposed ms": total / count * 1e3 if count else float("nan"),
                    "token 1 late by ms": (statistics.median(own[0] for own in gaps) - later) * 1e3,
                    "ttft ms": statistics.median(record.ttft for record in records) * 1e3,
                }
            )
    return rows


def _exposed(port: int) -> tuple[float, float]:
    """(count, sum of seconds) of the decode worker's histogram, after a moment for it to be told of the last one."""
    time.sleep(0.2)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(METRIC))
    return float(values[f"{METRIC}_count"]), float(values[f"{METRIC}_sum"])


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
