"""deploy.run_local with real processes and a tiny model: start, use, stop, and what goes wrong."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.client import Client
from tests.helpers.process import Process

READY = r"^router ready on (\S+)$"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Process]]:
    """Launchers, killed at the end with what they started."""
    launchers: list[Process] = []
    yield launchers
    for launcher in launchers:
        if launcher.is_alive:
            for child in psutil.Process(launcher.pid).children(recursive=True):
                child.kill()
            launcher.kill()


def launch(started: list[Process], model: Path, *arguments: str, log: Path) -> Process:
    options = ("--model", str(model), "--device", "cpu", "--port", "0", *arguments)
    launcher = Process("deploy.run_local", options, log=log)
    started.append(launcher)
    return launcher


def workers_of(launcher: Process) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children(recursive=True)


async def test_one_command_starts_a_cluster_that_answers_and_one_ctrl_c_ends_it(
    started: list[Process], tiny: Path, tmp_path: Path
) -> None:
    launcher = launch(started, tiny, "--max-context", "512", "--prefill", "2", log=tmp_path / "log")
    address = launcher.wait_for_line(READY)[1]
    async with Client(address) as client:
        answer = await client.generate("hello", sampling={"max_tokens": 5, "ignore_eos": True})
        assert len(answer.ids) == 5
        assert (await client.model()).max_context == 512
    workers = workers_of(launcher)
    assert len(workers) == 4
    launcher.signal(signal.SIGINT)
    assert launcher.wait(within=15) == 0
    assert not any(worker.is_running() for worker in workers)
    assert "Traceback" not in launcher.output
    assert "\033" not in launcher.output, "colour is for terminals"
    for name in ("router", "prefill0", "prefill1", "decode0"):
        assert f"\n{name:<8} | " in launcher.output


async def test_random_weights_need_no_weight_files_and_each_side_hears_its_own_options(
    started: list[Process], tiny: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    sides = ("--prefill-args=--pool-pages 50", "--decode-args=--pool-pages 60 --max-running 3")
    launcher = launch(started, model, "--load-format", "dummy", *sides, log=tmp_path / "log")
    async with Client(launcher.wait_for_line(READY)[1]) as client:
        assert len((await client.generate("hello", sampling={"max_tokens": 3, "ignore_eos": True})).ids) == 3
        workers = (await client.workers()).values()
    assert {worker.role: worker.total_pages for worker in workers} == {"prefill": 50, "decode": 60}
    launcher.signal(signal.SIGINT)
    assert launcher.wait(within=15) == 0


def test_lif_03_a_ctrl_c_during_the_start_is_an_ordinary_stop(started: list[Process], tiny: Path, tmp_path: Path) -> None:
    launcher = launch(started, tiny, log=tmp_path / "log")
    launcher.wait_for_line(r"^router +\| ")
    launcher.signal(signal.SIGINT)
    assert launcher.wait(within=30) == 0
    assert "Traceback" not in launcher.output


def test_a_worker_that_is_killed_takes_the_cluster_with_it(started: list[Process], tiny: Path, tmp_path: Path) -> None:
    launcher = launch(started, tiny, log=tmp_path / "log")
    launcher.wait_for_line(READY)
    (worker,) = (child for child in workers_of(launcher) if "decode_worker" in child.cmdline())
    others = [child for child in workers_of(launcher) if child != worker]
    worker.kill()
    assert launcher.wait(within=15) == 137
    assert "\nerror: decode0 ended with exit code 137: " in launcher.output
    assert not any(child.is_running() for child in others)


def test_lif_06_killing_the_launcher_leaves_no_orphan(started: list[Process], tiny: Path, tmp_path: Path) -> None:
    launcher = launch(started, tiny, log=tmp_path / "log")
    launcher.wait_for_line(READY)
    workers = workers_of(launcher)
    launcher.kill()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE] == []


def test_grp_04_a_taken_port_is_named(started: list[Process], tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        launcher = launch(started, tiny, "--port", port, log=tmp_path / "log")
        assert launcher.wait(within=10) == 2
    assert launcher.output.splitlines()[-1] == f"error: cannot listen on 127.0.0.1:{port}: address already in use"


@pytest.mark.parametrize("flaw", ["missing", "no tokenizer", "architecture"])
def test_lif_09_a_model_that_cannot_be_served_is_one_line_and_exit_code_2(
    flaw: str, started: list[Process], tiny: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if flaw != "missing":
        shutil.copytree(tiny, model)
    if flaw == "no tokenizer":
        (model / "tokenizer.json").unlink()
    if flaw == "architecture":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    launcher = launch(started, model, log=tmp_path / "log")
    assert launcher.wait(within=10) == 2
    (line,) = launcher.output.splitlines()
    assert line.startswith("error: ")
    assert str(model) in line
    assert {"missing": "does not exist", "no tokenizer": "has no tokenizer.json", "architecture": "MambaForCausalLM"}[
        flaw
    ] in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none_is_one_clear_line_of_a_worker_and_exit_code_2(
    started: list[Process], tiny: Path, tmp_path: Path
) -> None:
    launcher = launch(started, tiny, "--device", "cuda", log=tmp_path / "log")
    assert launcher.wait(within=50) == 2
    assert re.search(r"^error: \w+ ended with exit code 2: error: --device cuda:0: torch .*", launcher.output, re.MULTILINE)
    assert "Traceback" not in launcher.output


@pytest.mark.parametrize(("option", "value"), [("--device", "tpu"), ("--prefill", "-1"), ("--decode", "0")])
def test_an_option_that_cannot_work_is_one_line(
    option: str, value: str, started: list[Process], tiny: Path, tmp_path: Path
) -> None:
    launcher = launch(started, tiny, option, value, log=tmp_path / "log")
    assert launcher.wait(within=10) == 2
    (line,) = launcher.output.splitlines()
    assert line.startswith("error: ")
    assert value in line
