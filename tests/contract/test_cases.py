"""Each fault case that pdserve was built against has a test on real processes, with the case's id in its name; each fault of the
track record has one."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CASES = {
    "CAN": "01 02 04 07 08 10 11",  # cancellation
    "HND": "01 02 04 05 07 09 11 13 15",  # handoff
    "CAP": "02 04 05 06 07 09",  # capacity
    "FLT": "01 03 04 06 07 09 11 13",  # faults
    "CMP": "01 03",  # compatibility
    "GRP": "01 02 04 06 08 10 11",  # grpc
    "LIF": "01 03 05 06 08 09 11",  # lifecycle
    "OBS": "01 03",  # observability
}
PROCESSES_OF_OURS = re.compile(r"tests\.helpers\.(router_stand|fake_\w+|prefill_stand|decode_worker)\b")
"""What a module uses in which router or worker is not a process as users start it."""


def ids_in(name: str) -> set[str]:
    """test_can_01_and_02_x -> CAN-01, CAN-02."""
    found = re.findall(rf"_({'|'.join(CASES)})((?:_(?:and_)?\d\d)+)(?=_|$)", name, re.IGNORECASE)
    return {f"{group.upper()}-{number}" for group, numbers in found for number in re.findall(r"\d\d", numbers)}


def covered() -> set[str]:
    modules = [path.read_text() for tier in ("cluster", "faults") for path in (TESTS / tier).glob("test_*.py")]
    real = [text for text in modules if not PROCESSES_OF_OURS.search(text)]
    return {case for text in real for name in re.findall(r"def (test_\w+)", text) for case in ids_in(name)}


def test_every_case_has_a_test_on_real_processes() -> None:
    cases = {f"{group}-{number}" for group, numbers in CASES.items() for number in numbers.split()}
    assert not cases - covered()


def test_every_test_that_the_track_record_names_is_there() -> None:
    record = (TESTS.parent / "docs" / "track-record.md").read_text()
    named = re.findall(r"`(tests/\w+/\w+\.py)::(\w+)", record)
    assert named and not [test for file, test in named if f"def {test}(" not in (TESTS.parent / file).read_text()]


def test_ids_are_found_in_names() -> None:
    assert ids_in("test_can_01_and_02_something_hnd_15") == {"CAN-01", "CAN-02", "HND-15"}
    assert ids_in("test_a_thing_that_can_wait_10_s_GRP_02") == {"GRP-02"}
    assert not ids_in("test_a_thing_that_can_1")
