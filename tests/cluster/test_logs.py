"""Log lines of all three processes: every one about a request names it, and none has its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc

from tests.helpers.client import first_event
from tests.helpers.cluster import Cluster
from tests.helpers.process import Process

ARGS = ("--page-size", "4", "--pool-pages", "300", "--max-context", "1024")
JSON = ("--log-format", "json", "--log-level", "debug")
MARKER = "xylophone"
ABOUT_AN_ATTEMPT = ("router.attempts", "router.dispatch", "prefill_worker.journey", "prefill_worker.leases")
CALLS = ("Generate:", "Reserve:", "Commit:", "Release:", "Push:")


def lines(process: Process) -> list[dict[str, Any]]:
    """Every line, but for what is printed to standard output. Raises if one is no JSON."""
    return [json.loads(line) for line in process.output.splitlines() if " ready on " not in line]


def is_about_an_attempt(line: dict[str, Any]) -> bool:
    return line["logger"] in ABOUT_AN_ATTEMPT or any(call in line["message"] for call in CALLS[1:])


async def make_trouble(cluster: Cluster) -> None:
    """A good request, refused ones, and one whose decode worker dies for good."""
    async with cluster.client() as client:
        await client.generate(f"a {MARKER} and a hat", request_id="good", sampling={"max_tokens": 3})
        await client.refusal(f"a {MARKER}", request_id="bad", sampling={"max_tokens": 0})
        await client.refusal([5] * 1025, request_id="long")
        sampling = {"max_tokens": 900, "ignore_eos": True}
        call = client.call(f"the {MARKER}", request_id="lost", sampling=sampling)
        await first_event(call, "delta")
        await client.refusal("hat", request_id="lost", sampling={"max_tokens": 1})
        cluster.decode[0].kill()
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_every_line_about_a_request_names_it_and_none_has_its_text(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, worker_args=[*ARGS, *JSON], router_args=JSON) as cluster:
        await make_trouble(cluster)
        router = lines(cluster.router)
        everything = [line for process in cluster.processes for line in lines(process)]
    assert {line["process"] for line in everything} == {"router", "prefill", "decode"}
    for line in everything:
        assert MARKER not in json.dumps(line), line
        if is_about_an_attempt(line):
            assert {"request_id", "uid", "attempt"} <= set(line), line
        elif "/Generate:" in line["message"]:
            assert "request_id" in line, line
    failed = [line for line in router if line["message"].startswith("attempt 1 failed")]
    assert [line["request_id"] for line in failed] == ["lost"]
    ends = {line["request_id"]: line for line in router if "/Generate:" in line["message"] and "UNAVAILABLE" in line["message"]}
    assert ends["lost"]["uid"] == failed[0]["uid"] and ends["lost"]["attempt"] >= 1
    refused = {line["request_id"] for line in router if "/Generate:" in line["message"]}
    assert refused == {"bad", "long", "lost"}
