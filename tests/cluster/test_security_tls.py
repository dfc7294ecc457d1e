"""TLS on every link of a real cluster: mutual, and with tokens instead of clients' certificates."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import trustme

from common.errors import StartError
from deploy.smoke import ROOT, find_grpcurl
from tests.cluster.conftest import SMALL
from tests.cluster.test_security_tokens import addresses
from tests.helpers.calls import rpcs_of, status_of
from tests.helpers.client import first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt
from tests.helpers.secrets import Secrets

pytestmark = pytest.mark.cluster


def tls_cluster(folder: Path, model: Path, secrets: Secrets, *, mutual: bool) -> Cluster:
    return Cluster(
        folder,
        model,
        worker_args=[*SMALL, *secrets.shared_args(mutual=mutual)],
        prefill_args=["--transport", "grpc"],
        router_args=secrets.router_args(mutual=mutual),
        connect=lambda address: secrets.client(address, certificate=mutual),
    )


def speaks_tls(address: str) -> bool:
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), timeout=5) as raw, context.wrap_socket(raw) as wrapped:
        return wrapped.version() in ("TLSv1.2", "TLSv1.3")


async def test_mutual_tls_on_every_link_and_a_whole_new_authority_without_a_restart(tiny: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "secrets").mkdir()
    secrets = Secrets(folder, tls=True)
    with tls_cluster(tmp_path, tiny, secrets, mutual=True) as cluster:
        async with cluster.client() as client:
            assert len((await client.generate(prompt(20), sampling={"max_tokens": 6, "ignore_eos": True})).ids) == 6
            for address in addresses(cluster).values():
                assert await asyncio.to_thread(speaks_tls, address)
                async with secrets.client(address, certificate=False) as stranger:
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stranger.model()
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

            running = client.call(prompt(9), sampling={"max_tokens": 900, "ignore_eos": True})
            await first_event(running, "delta")
            secrets.issue(trustme.CA())
            # A worker that joins now has only the new files: each side must have taken them over to let it in.
            late = cluster.start_worker("decode")
            await asyncio.to_thread(cluster.wait_until_joined, late)
            cluster.decode[0].kill()
            cluster.decode.remove(cluster.decode[0])
            last = await first_event(running, "finished")
            assert last.finished.usage.completion_tokens == 900, "went on with the worker that joined under new certificates"

            async def only_the_late_one() -> bool:
                return sum(worker.role == "decode" for worker in (await client.workers()).values()) == 1

            await eventually(only_the_late_one, within=5)
            assert len((await client.generate(prompt(21), sampling={"max_tokens": 6, "ignore_eos": True})).ids) == 6
            await cluster.assert_idle(client)


async def test_tls_with_tokens_and_without_clients_certificates(tiny: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "secrets").mkdir()
    secrets = Secrets(folder, tls=True, tokens=True)
    with tls_cluster(tmp_path, tiny, secrets, mutual=False) as cluster:
        async with cluster.client() as client:
            assert len((await client.generate(prompt(20), sampling={"max_tokens": 6, "ignore_eos": True})).ids) == 6
            await cluster.assert_idle(client)
        await asyncio.to_thread(_grpcurl_speaks_to, cluster, secrets)
        await asyncio.to_thread(_smoke_passes, cluster, secrets)
        worker_only = secrets.connect(cluster.address, certificate=False, tokens=secrets.workers)
        async with worker_only:
            generate = next(rpc for rpc in rpcs_of("router") if rpc.path.endswith("/Generate"))
            assert await status_of(worker_only, generate) is grpc.StatusCode.PERMISSION_DENIED


def grpcurl() -> str | None:
    """On PATH, or where `make smoke` has put it."""
    try:
        return find_grpcurl(install=False)
    except StartError:
        return None


def _grpcurl_speaks_to(cluster: Cluster, secrets: Secrets) -> None:
    """As the README says."""
    if (program := grpcurl()) is None:
        return
    method = [cluster.address, "pdserve.v1.GenerationService/GetModel"]
    ca, token = ["-cacert", str(secrets.ca)], ["-H", f"authorization: Bearer {secrets.client_token}"]
    done = subprocess.run([program, *ca, *token, *method], capture_output=True, text=True, timeout=20, check=True)
    model = {name.lower().replace("_", ""): value for name, value in json.loads(done.stdout).items()}
    assert model["vocabsize"] == 384
    for options, why in ((ca, "Unauthenticated"), ([*token], "certificate"), (["-plaintext", *token], "")):
        refused = subprocess.run(
            [program, *options, "-connect-timeout", "2", *method], capture_output=True, text=True, timeout=20
        )
        assert refused.returncode != 0 and why.lower() in refused.stderr.lower(), refused.stderr


def _smoke_passes(cluster: Cluster, secrets: Secrets) -> None:
    """With the options that users pass through, and without the token in what it prints."""
    if grpcurl() is None:
        return
    port = cluster.address.rpartition(":")[2]
    line = [
        sys.executable,
        "-m",
        "deploy.smoke",
        "--port",
        port,
        "--tls-ca",
        str(secrets.ca),
        "--token-file",
        str(secrets.clients),
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "0 failed" in done.stdout and secrets.client_token not in done.stdout
