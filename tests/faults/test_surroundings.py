"""What a process is started in, and stopped in: a log that nobody reads, a moment too early."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.address import Address
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import Client
from tests.helpers.process import ROOT, Process, free_port

pytestmark = pytest.mark.faults


async def test_a_log_that_nobody_reads_holds_up_no_call(tiny: Path) -> None:
    """stderr is a pipe whose reader has stopped, full before the router has said its first word."""
    address = f"127.0.0.1:{free_port()}"
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    line = [sys.executable, "-m", "deploy.tied", str(os.getpid()), sys.executable, "-m", "router"]
    args = ["--model", str(tiny), "--listen", address]
    process = subprocess.Popen([*line, *args], cwd=ROOT, stderr=writer, stdin=subprocess.DEVNULL)  # noqa: ASYNC220
    os.close(writer)
    try:
        async with Client(address) as client:
            await client.stub.GetModel(pb.GetModelRequest(), timeout=30, wait_for_ready=True)
            for _ in range(100):
                code, _ = await client.refusal([1], sampling={"max_tokens": 0})
                assert code is grpc.StatusCode.INVALID_ARGUMENT
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)


@pytest.mark.parametrize("reader", ["stopped", "gone"])
def test_a_worker_whose_word_that_it_is_ready_nobody_reads_serves_and_ends_well(tiny: Path, tmp_path: Path, reader: str) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    if reader == "gone":
        os.close(read)
    else:
        os.write(write, b"x" * 4096)
    listen = f"unix:{tmp_path}/s"
    line = [sys.executable, "-m", "deploy.tied", str(os.getpid()), sys.executable, "-m", "decode_worker"]
    args = ["--model", str(tiny), "--engine", "sim", "--listen", listen]
    with subprocess.Popen([*line, *args], cwd=ROOT, stdout=write, stdin=subprocess.DEVNULL) as process:
        os.close(write)
        try:
            with grpc.insecure_channel(listen) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="pdserve.v1.DecodeService")
                watch = stub.Watch(request, timeout=40, wait_for_ready=True)
                assert any(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in watch)
                watch.cancel()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_more_clients_than_the_usual_number_of_files_are_served(tiny: Path) -> None:
    """The soft limit is where a shell begins, the hard one what the system allows."""
    address = Address("127.0.0.1", free_port())
    line = [sys.executable, "-m", "deploy.tied", str(os.getpid()), sys.executable, "-m", "router"]
    limited = f"ulimit -Sn 128 && exec {shlex.join([*line, '--model', str(tiny), '--listen', str(address)])}"
    with contextlib.ExitStack() as clients:
        process = clients.enter_context(subprocess.Popen(["sh", "-c", limited], cwd=ROOT, stderr=subprocess.PIPE, text=True))
        clients.callback(process.kill)
        assert process.stderr is not None
        assert any("listening on" in written for written in iter(process.stderr.readline, ""))
        for _ in range(200):
            one = clients.enter_context(socket.create_connection((address.host, address.port), timeout=10))
            assert len(one.recv(9)) == 9, "HTTP/2 begins with the server's settings"


@pytest.mark.parametrize("module", ["router", "prefill_worker", "decode_worker", "deploy.run_local"])
def test_lif_03_a_program_told_to_stop_while_it_imports_what_it_needs_ends_at_once_and_well(tmp_path: Path, module: str) -> None:
    (tmp_path / "uvloop.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    args = [] if module == "deploy.run_local" else ["--model", "."]
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in (number for number in stops if signal.getsignal(number) is not signal.SIG_IGN):  # As under nohup: inherited.
        with subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "importing\n"
                process.send_signal(number)
                assert process.wait(20) == 0 and process.stdout.read() == ""
            finally:
                process.kill()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_told_to_stop_while_it_starts_ends_at_once_and_well(
    tiny: Path, tmp_path: Path, role: str, number: signal.Signals
) -> None:
    listen = f"unix:{tmp_path}/s"
    process = Process(f"{role}_worker", ["--model", str(tiny), "--listen", listen], log=tmp_path / "log")
    process.wait_for_line(f"{role} worker .*: model=")
    process.signal(number)
    assert process.wait(within=20) == 0
    assert not (tmp_path / "s").exists() and "Traceback" not in process.output
