"""How busy the event loop's thread is."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest

import router.demand as demand_module
from router.demand import Demand

pytestmark = pytest.mark.unit


def spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.quiet
def test_a_thread_that_sleeps_wants_nothing_and_one_that_works_all_of_the_time() -> None:
    demand = Demand()
    time.sleep(0.2)
    assert demand.since_last(time.monotonic()) < 0.2
    spin(0.2)
    assert demand.since_last(time.monotonic()) > 0.7, "also on cores that others keep busy: waiting for one counts"


@pytest.mark.quiet
def test_it_counts_the_thread_that_made_it_alone() -> None:
    demand = Demand()
    other = threading.Thread(target=spin, args=(0.2,))
    other.start()
    time.sleep(0.2)
    asleep = demand.since_last(time.monotonic())
    other.join()
    assert asleep < 0.5


@pytest.mark.quiet
@pytest.mark.parametrize("counted", [None, b"0 0 0\n"])
def test_without_the_kernel_s_count_it_is_processor_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: bytes | None
) -> None:
    schedstat = tmp_path / "schedstat"
    if counted is not None:
        schedstat.write_bytes(counted)
    monkeypatch.setattr(demand_module, "SCHEDSTAT", schedstat)
    demand = Demand()
    time.sleep(0.1)
    assert demand.since_last(time.monotonic()) < 0.5
    spin(0.1)
    assert demand.since_last(time.monotonic()) > 0.1


def test_it_needs_no_file_descriptor_later() -> None:
    demand = Demand()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            Path("/proc/self/stat").read_bytes()
        assert demand.since_last(time.monotonic()) >= 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
