"""bench/serve.py against a running cluster, a launched one, and one that fails: seconds each, figures of any size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster

SHORT = ("--input", "5-20", "--output", "6", "--warmup", "0.3", "--seconds", "1", "--tail", "0.3", "--drain", "5")


def written(out: Path) -> dict[str, Any]:
    (file,) = out.glob("serve-*.json")
    results: dict[str, Any] = json.loads(file.read_text())
    return results


async def test_an_open_load_is_measured_by_several_clients(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    argv = ["open", "--router", cluster.address, "--rate", "20", "--clients", "2", "--out", str(tmp_path), *SHORT]
    assert serve.main(argv) == 0
    (load,) = written(tmp_path)["loads"]
    assert load["requests"] > 5 and load["failed"] == {} and load["client"]["clients"] == 2
    assert 0 < load["ms"]["ttft"]["p50"] <= load["ms"]["ttft"]["p99"] <= load["ms"]["e2e"]["max"]
    assert load["ms"]["gap"]["p50"] is not None


async def test_a_trace_is_replayed_and_what_is_refused_is_counted(
    client: Client, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"at": 0, "input": 9, "output": 3}\n{"at": 0.1, "input": 9, "output": 2}\n{"at": 0.1, "input": 100000, "output": 1}\n'
    )
    assert serve.main(["open", "--router", cluster.address, "--trace", str(trace), "--out", str(tmp_path)]) == 0
    (load,) = written(tmp_path)["loads"]
    assert (load["requests"], load["output_tokens"], load["failed"]) == (3, 5, {"OUT_OF_RANGE": 1})
    assert "trace.jsonl" in capsys.readouterr().out


async def test_streams_are_measured_alone_and_beside_prompts_and_cut_at_the_end(
    client: Client, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "interference",
        "--router",
        cluster.address,
        "--streams",
        "2",
        "--prompt",
        "100",
        "--rate",
        "5",
        "--out",
        str(tmp_path),
    ]
    assert serve.main([*argv, "--input", "8", "--output", "900", "--warmup", "0.3", "--seconds", "1", "--clients", "1"]) == 0
    (result,) = written(tmp_path)["interference"]
    assert result["rate"] == 5 and result["capacity"] is None
    assert result["gaps"]["p99"]["alone_ms"] > 0
    assert result["prompts"]["failed"] == {}
    assert "p99 ratio" in capsys.readouterr().out


def test_goodput_of_a_launched_cluster_is_the_highest_rate_of_the_grid_that_holds(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["goodput", "--launch", "--model", str(tiny), "--device", "cpu", "--lowest", "4", "--highest", "8", "--ratio", "2"]
    objectives = ["--slo", "ttft:p90:60s", "--sweep", "gap:p99:60s", "--sweep", "gap:p50:0.000001ms"]
    assert serve.main([*argv, *objectives, *SHORT, "--out", str(tmp_path)]) == 0
    results = written(tmp_path)
    assert [(each["slo"][-1], each["requests_per_s"]) for each in results["goodput"]["split-1p1d"]] == [
        ("gap:p50:1e-06ms", None),
        ("gap:p99:60000ms", 8.0),
    ]
    assert [load["rate"] for load in results["loads"]] == [4.0, 8.0]
    assert "objectives" in capsys.readouterr().out
    assert "router" in (tmp_path / "logs" / "split-1p1d.log").read_text()


async def test_everything_at_once_gives_tokens_per_second(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    argv = ["offline", "--router", cluster.address, "--requests", "12", "--temperature", "0.6", "--out", str(tmp_path)]
    assert serve.main([*argv, "--input", "10-40", "--output", "10-40"]) == 0
    (load,) = written(tmp_path)["loads"]
    assert load["requests"] == 12 and load["failed"] == {} and load["output_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--launch", "--model", "/nowhere", "--device", "cpu"], "model path /nowhere does not exist"),
        (["--router", "127.0.0.1:1", "--trace", "/nowhere"], "No such file"),
    ],
)
def test_what_cannot_be_measured_is_said_and_nothing_is_written(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["open", *argv, "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert not list(tmp_path.glob("serve-*"))
