"""A decode step's state on the device: gathered, moved on, and written to by uploads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from common.engine.cuda import kernels

ROWS = 9
PAGE_SIZE = 16
PAGES_PER_ROW = 20
DUMMY = ROWS - 1
POISON = -7


class State:
    """Rows of random lengths with random pages; the dummy's length is 1."""

    def __init__(self, device: torch.device, id_dtype: torch.dtype = torch.int32) -> None:
        context = PAGES_PER_ROW * PAGE_SIZE
        self.token = torch.randint(0, 1000, (ROWS,), dtype=id_dtype, device=device)
        self.device_len = torch.randint(1, context + 1, (ROWS,), dtype=torch.int32, device=device)
        self.device_len[:3] = torch.tensor([1, PAGE_SIZE, PAGE_SIZE + 1])
        self.device_len[DUMMY] = 1
        self.pages = torch.randperm(ROWS * PAGES_PER_ROW, device=device).int().view(ROWS, PAGES_PER_ROW)
        offsets = torch.arange(PAGE_SIZE, dtype=torch.int32, device=device)
        self.page_table = (self.pages[:, :, None] * PAGE_SIZE + offsets).view(ROWS, context)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("table_block", [8, 256])
def test_a_step_s_inputs_are_gathered_from_the_rows_in_it(
    device: torch.device, id_dtype: torch.dtype, table_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TABLE_BLOCK", table_block)
    state = State(device, id_dtype)
    slots = torch.tensor([2, 0, 5, 1, DUMMY, DUMMY], dtype=torch.int32, device=device)
    input_ids, positions, out_loc = (torch.full((7,), POISON, dtype=id_dtype, device=device) for _ in range(3))
    seq_lens = torch.full((7,), POISON, dtype=torch.int32, device=device)
    block_tables = torch.full((7, PAGES_PER_ROW + 3), POISON, dtype=torch.int32, device=device)
    kernels.gather_step(
        slots,
        token=state.token,
        device_len=state.device_len,
        page_table=state.page_table,
        input_ids=input_ids,
        positions=positions,
        seq_lens=seq_lens,
        out_loc=out_loc,
        block_tables=block_tables,
        page_size=PAGE_SIZE,
    )
    for entry, slot in enumerate(slots.tolist()):
        length = int(state.device_len[slot])
        pages = -(-length // PAGE_SIZE)
        got = [int(x[entry]) for x in (input_ids, positions, seq_lens, out_loc)]
        assert got == [int(state.token[slot]), length - 1, length, int(state.page_table[slot, length - 1])]
        assert block_tables[entry, :pages].tolist() == state.pages[slot, :pages].tolist()
        assert (block_tables[entry, pages:] == POISON).all()
    assert all(int(x[6]) == POISON for x in (input_ids, positions, seq_lens, out_loc)) and (block_tables[6] == POISON).all()


@pytest.mark.parametrize("padding", [0, 2, 130])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_live_rows_advance_and_the_dummy_does_not(device: torch.device, id_dtype: torch.dtype, padding: int) -> None:
    state = State(device)
    token, device_len = state.token.clone(), state.device_len.clone()
    slots = torch.tensor([4, 0, 7] + [DUMMY] * padding, dtype=torch.int32, device=device)
    next_token = torch.randint(1000, 2000, slots.shape, dtype=id_dtype, device=device)
    kernels.advance(slots, next_token, token=token, device_len=device_len, dummy_slot=DUMMY)
    state.token[[4, 0, 7]] = next_token[:3].int()
    state.device_len[[4, 0, 7]] += 1
    assert torch.equal(token, state.token) and torch.equal(device_len, state.device_len)


@pytest.mark.parametrize("host_knows_count", [True, False])
@pytest.mark.parametrize("count", [0, 1, 19])
def test_uploaded_pages_are_in_the_table(device: torch.device, count: int, host_knows_count: bool) -> None:
    state = State(device)
    places = torch.randperm(ROWS * PAGES_PER_ROW)[:count]
    pages = torch.randint(0, 1 << 20, (count,))
    triples = torch.stack([places // PAGES_PER_ROW, places % PAGES_PER_ROW, pages], dim=1)
    left_over = torch.zeros(2, 3, dtype=triples.dtype)  # of an earlier, longer upload: row 0's page 0 must stay
    updates = torch.cat([torch.tensor([count]), triples.flatten(), left_over.flatten()]).int().to(device)
    got = state.page_table.clone()
    kernels.scatter_updates(updates, got, page_size=PAGE_SIZE, count=count if host_knows_count else None)
    by_page = state.page_table.view(ROWS, PAGES_PER_ROW, PAGE_SIZE)
    for row, index, page in triples.tolist():
        by_page[row, index] = page * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device).int()
    assert torch.equal(got, state.page_table)
