"""What every test shares: the tier marker follows from the folder, so nobody has to write it."""

from pathlib import Path

import pytest

TIERS = {"unit", "contract", "cluster", "faults", "gpu"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = Path(item.path).relative_to(Path(__file__).parent).parts[0]
        if tier in TIERS and item.get_closest_marker(tier) is None:
            item.add_marker(tier)
