"""A prefill engine that shows its pages, so that what arrived elsewhere can be compared with them.

build_gpu_keeper and build_fake_keeper make its core in any process: a real engine on a GPU, or FakeRunner on FakeCuda.
"""

from __future__ import annotations

from typing import Any

from common.engine.config import EngineConfig
from common.engine.handle import Emit
from common.engine.page_table import PageTable
from common.engine.pages import pages_for
from common.work_key import WorkKey
from prefill_worker.build import build_runner
from prefill_worker.core import PrefillCore
from prefill_worker.cuda_tools import cuda_tools_for
from tests.helpers.fake_cuda import FakeCuda, StoringRunner, cuda_tools

MAX_RUNNING = 4


class PageKeeper(PrefillCore):
    """Besides a prefill engine's commands: ("pages", key): what a request's pages hold of its input, page by page, until it is
    forgotten; of the last page, its tokens alone."""

    def handle(self, command: Any, call_id: int | None) -> Any:
        match command:
            case ("pages", WorkKey() as key):
                return self._pages_of(key)
        return super().handle(command, call_id)

    def _pages_of(self, key: WorkKey) -> list[bytes]:
        job, size = self._jobs[key], self._page_size
        assert isinstance(self._runner.page_table, PageTable)
        pages = _pages_of_row(self._runner.page_table, job.req.table_idx, pages_for(job.input_len, size))
        return [
            self._runner.pool.read_page(page, tokens=min(size, job.input_len - index * size)) for index, page in enumerate(pages)
        ]


def _pages_of_row(table: PageTable, row: int, count: int) -> list[int]:
    on_host = getattr(table, "pages", None)  # A CudaPageTable's: its tensor is up to date after flush() only.
    if on_host is not None:
        return [int(page) for page in on_host[row, :count]]
    return [location // table.page_size for location in table.tensor[row, : count * table.page_size : table.page_size].tolist()]


def build_gpu_keeper(config: EngineConfig, emit: Emit) -> PageKeeper:
    runner = build_runner(config, None, lambda text: None)
    tools = cuda_tools_for(runner.pool)
    assert tools is not None
    return PageKeeper(runner, emit=emit, max_running=MAX_RUNNING, chunk_tokens=config.chunk_tokens, cuda=tools)


def build_fake_keeper(chunk_tokens: int, emit: Emit) -> PageKeeper:
    runner = StoringRunner(num_pages=128, page_size=4, rows=MAX_RUNNING, max_context=300)
    tools = cuda_tools(FakeCuda(), runner.pool, [])
    return PageKeeper(runner, emit=emit, max_running=MAX_RUNNING, chunk_tokens=chunk_tokens, cuda=tools)
