"""What becomes of leases when renewing them goes wrong in a way that nobody has thought of."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.errors import PdserveError
from common.work_key import WorkKey
from prefill_worker.leases import Lease, Leases
from prefill_worker.pairing import Pairing
from tests.helpers.eventually import eventually

pytestmark = pytest.mark.unit


class BrokenStub:
    """A DecodeServiceStub whose first Renew is a mistake in the program."""

    def __init__(self) -> None:
        self.renewals = 0

    async def Renew(self, request: Any, *, timeout: float) -> Any:
        self.renewals += 1
        if self.renewals == 1:
            raise RuntimeError("a mistake")
        return type("Renewed", (), {"lost": []})


def lease_of(uid: int, lost: list[PdserveError]) -> Lease:
    engine: Any = None
    pairing = Pairing(pair_id="p", worker_id="d", transport="grpc", link=None, engine=engine, on_gone=lambda pairing: None)
    pairing.hold()
    deadline = time.monotonic() + 60
    return Lease(WorkKey(1, uid, 1), "", f"ticket {uid}", pairing, (), 0, 0.03, deadline, lost.append)


async def test_leases_are_lost_at_once_when_renewing_them_breaks_and_later_ones_are_renewed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub: Any = BrokenStub()
    leases = Leases(stub, post=lambda command: None, clock=time.monotonic)
    lost: list[PdserveError] = []
    leases.keep(lease_of(1, lost))
    await eventually(lambda: bool(lost), within=5)
    assert "internal error" in str(lost[0]) and "a mistake" in caplog.text and leases.is_idle
    leases.keep(lease_of(2, lost))
    await eventually(lambda: stub.renewals >= 3, within=5)
    assert len(lost) == 1
    await leases.close(patience_seconds=0)
