"""cuda_ipc page by page, the prefill engine in a process of its own; the GPUs are FakeCuda's. Real ones: tests/gpu."""

from __future__ import annotations

from functools import partial

import pytest

from tests.helpers.fake_cuda import FakeCuda, cuda_pool
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.handoff_pages import check_all, handoffs
from tests.helpers.page_keeper import build_fake_keeper

pytestmark = pytest.mark.cluster


async def test_every_page_arrives_as_it_was_computed_and_no_other_byte_changes() -> None:
    memory, export = cuda_pool(FakeCuda(), num_pages=100, page_bytes=2 * 4 * 4)
    pool = FakeRunner(num_pages=100, page_size=4, storage=memory.view).pool
    async with handoffs(partial(build_fake_keeper, 7), pool, export) as pair:
        await check_all(pair, (1, 3, 4, 5, 19, 130), page_size=4, vocab=200)
