"""What every test shares: the tier marker follows from the folder, so nobody has to write it."""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

# Before torch is imported: the tests' models are too small for two threads, and threads that wait for each other by spinning
# take the cores from the processes under test (a reference of 8 s took 80 s beside them).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What starts the tests in the background may have these ignored, and all processes under test would: a Ctrl-C is not heard then.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

with suppress(ModuleNotFoundError):  # Only where there are tests with it.
    from hypothesis import HealthCheck, settings

    # On a machine whose cores are all taken, how long an example takes says nothing of it.
    settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("ours")

TIERS = {"unit", "contract", "cluster", "faults", "gpu"}
LONGEST = "test_deploy_default_model.py"
"""Runs first: a lane of `make test` that began it last would end last, alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also tests marked long: cases with their waits at full length")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        long = [item for item in items if item.get_closest_marker("long") is not None]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    for item in items:
        tier = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        if tier in TIERS and item.get_closest_marker(tier) is None:
            item.add_marker(tier)
    items.sort(key=lambda item: item.path.name != LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows the end of each process's output, not only of the one that was waited for."""
    report = yield
    if report.failed and (process := sys.modules.get("tests.helpers.process")) is not None:
        report.sections += process.last_words()
    return report


@pytest.fixture(params=[0, 1], ids=["lookahead-0", "lookahead-1"])
def each_lookahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """For modules whose tests are to run over runners of both kinds."""
    from tests.helpers.fake_runner import FakeRunner

    monkeypatch.setattr(FakeRunner, "default_lookahead", request.param)
    return int(request.param)
