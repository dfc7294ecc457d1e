"""What several rooms' tests arrange in the same way. Torch is imported where it is asked for: most rooms do without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers.prefill_core import CoreDriver
    from tests.helpers.prefill_stand import PrefillStand, Stands


@pytest.fixture
async def stands() -> AsyncIterator[Stands]:
    """Makes a prefill worker with its decode worker; both are checked and closed at the end."""
    from tests.helpers.fake_decode import FakeDecode
    from tests.helpers.prefill_stand import PrefillStand

    async with AsyncExitStack() as stack:

        async def make(*, lease_ms: int = 10_000, offer_shm: bool = True, **kwargs: Any) -> PrefillStand:
            decode = FakeDecode(lease_ms=lease_ms, offer_shm=offer_shm)
            await decode.start()
            stack.push_async_callback(decode.stop)
            return await stack.enter_async_context(PrefillStand(decode, **kwargs))

        yield make


@pytest.fixture
def drivers() -> Iterator[Any]:
    """Makes drivers of prefill cores; at the end each must be able to give everything back."""
    from tests.helpers.prefill_core import CoreDriver

    made: list[CoreDriver] = []

    def make(**kwargs: Any) -> CoreDriver:
        made.append(CoreDriver(**({"page_size": 4} | kwargs)))
        return made[-1]

    yield make
    for driver in made:
        for key in list(driver.core._jobs):
            driver.forget(key)
        driver.assert_idle()
