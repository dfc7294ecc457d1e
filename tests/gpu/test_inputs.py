"""The inputs of a prefill step that is launched kernel by kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("flashinfer", reason="flashinfer is not installed")

from common.core import Batch, Req, SamplingParams
from common.engine.cuda.attention import CudaMetadata
from common.engine.cuda.inputs import PrefillInputs
from common.engine.cuda.linear_plans import best_plan
from common.engine.cuda.page_table import CudaPageTable
from common.engine.kv_pool import KVPool
from common.engine.peer_store import PeerStore

PAGE_SIZE = 16
POOL_PAGES = 64
ROW_PAGES = 3
STORE = PeerStore(base=1 << 20, prefix_len=0, page_ids=(3, 5, 7))


@pytest.mark.parametrize("lengths", [[1], [1] * 11, [5, 1, 3], [2] * 20, [40]])
@pytest.mark.parametrize("is_last", [True, False])
def test_few_tokens_are_padded_past_what_small_linear_computes(device: torch.device, lengths: list[int], is_last: bool) -> None:
    table = CudaPageTable(24, ROW_PAGES * PAGE_SIZE, page_size=PAGE_SIZE, dummy_page=POOL_PAGES, device=device)
    pool = KVPool(POOL_PAGES, num_layers=1, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=32, dtype=torch.half, device=device)
    inputs = PrefillInputs(table, pool, max_tokens=48, max_reqs=24, device=device)
    reqs = [_req(length, table.take_row(), is_last=is_last) for length in lengths]
    pages = torch.randperm(POOL_PAGES)[: ROW_PAGES * len(reqs)].view(-1, ROW_PAGES).tolist()
    for req, own in zip(reqs, pages, strict=True):
        table.assign(req.table_idx, 0, own)
    batch = Batch(reqs, "prefill")
    spans = inputs.prepare(batch, {reqs[0]: STORE})

    positions = [position for length in lengths for position in range(length)]
    locations = [own[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for own, n in zip(pages, lengths, strict=True) for i in range(n)]
    padded = len(batch.input_ids)
    padding = padded - len(positions)
    assert spans.query_len.tolist() == lengths
    assert batch.positions.tolist() == positions + [0] * padding
    assert batch.input_ids.tolist() == [position + 1 for position in positions] + [0] * padding
    assert batch.out_loc.tolist() == locations + [-1] * padding
    metadata = batch.attn_metadata
    assert isinstance(metadata, CudaMetadata) and metadata.peer_addr is not None and metadata.logit_rows is not None
    assert (metadata.peer_addr != 0).tolist() == [i < lengths[0] for i in range(padded)]
    rows, ends = metadata.logit_rows.tolist(), (torch.tensor(lengths).cumsum(0) - 1).tolist()
    assert rows == (ends + [0] * (len(rows) - len(ends)) if is_last else [])
    weight = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    assert best_plan(padded, weight) is None and (not rows or best_plan(len(rows), weight) is None)


def _req(length: int, row: int, *, is_last: bool) -> Req:
    """A prompt of ids 1, 2, ..., or so many tokens of a longer one."""
    ids = torch.arange(1, length + (1 if is_last else 2), dtype=torch.int32)
    req = Req(ids, row, 0, 1, uid=row, sampling_params=SamplingParams(), cache_handle=None)
    req.take_chunk(length)
    return req
