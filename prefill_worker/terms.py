"""Terms: how a prefill worker hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from common.handoff.choose import TransportMode
from common.handoff.sim_link import SimTransfers
from common.rpc.channels import Connect, make_channel
from common.work import Compatibility


@dataclass(frozen=True)
class Terms:
    """worker_id, compatibility, page_bytes: its own. transport: what --transport says. verify: checksums in each Commit.
    transfer_timeout: longest stall of a transfer, and longest wait for Commit to be answered. can_copy: its pool is in host
    memory, so that pages can be copied from it into a mapped one (shm). connect: makes the channels to decode workers.
    sim: how transfers between simulated workers go; None: this worker is none. stood_still: this process did, until a moment ago,
    so that a decode worker may have answered in time and not been heard.
    """

    worker_id: str
    compatibility: Compatibility
    page_bytes: int
    transport: TransportMode = "auto"
    verify: bool = False
    transfer_timeout: timedelta = timedelta(seconds=10)
    can_copy: bool = True
    connect: Connect = make_channel
    sim: SimTransfers | None = None
    stood_still: Callable[[], bool] = lambda: False
