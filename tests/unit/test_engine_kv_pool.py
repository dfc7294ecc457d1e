"""KVPool: page-first bytes that handoff, attention and model see in the same places."""

from __future__ import annotations

import pytest
import torch

from common.engine.kv_pool import KVPool, page_bytes
from common.handoff.cuda_ipc import NONCE_BYTES


def make_pool(num_pages: int = 5, *, storage: memoryview | None = None, dtype: torch.dtype = torch.float32) -> KVPool:
    return KVPool(num_pages, num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, storage=storage)


def test_a_page_is_one_block_of_all_layers() -> None:
    pool = make_pool()
    assert pool.tensor.shape == (5, 3, 2, 4, 2, 8)
    assert (
        pool.page_bytes
        == page_bytes(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
        == 3 * 2 * 4 * 2 * 8 * 4
    )
    pool.tensor[3] = torch.arange(pool.tensor[3].numel()).view(3, 2, 4, 2, 8)
    page = torch.frombuffer(pool.page_view(3), dtype=torch.float32)
    assert page.tolist() == list(range(len(page)))
    assert not any(pool.page_view(2)) and not any(pool.page_view(4))


def test_bytes_written_through_a_page_view_are_the_page_s() -> None:
    source, target = make_pool(), make_pool()
    source.tensor[1] = torch.randn(source.tensor[1].shape)
    target.page_view(4)[:] = source.page_view(1)
    assert torch.equal(target.tensor[4], source.tensor[1])


def test_a_page_view_of_an_unknown_page_is_refused() -> None:
    pool = make_pool()
    for page in (-1, 5):
        with pytest.raises(IndexError, match=r"page must be in \[0, 5\)"):
            pool.page_view(page)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_tokens_are_at_their_locations_in_their_layer_only(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    k, v = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 2, 8).to(dtype)
    out_loc = torch.tensor([0 * 4 + 3, 4 * 4 + 0, 2 * 4 + 1])
    pool.store(1, k, v, out_loc)
    for token, (page, offset) in enumerate([(0, 3), (4, 0), (2, 1)]):
        assert torch.equal(pool.k(1)[page, offset], k[token])
        assert torch.equal(pool.v(1)[page, offset], v[token])
    assert not pool.tensor[:, [0, 2]].any()
    assert int((pool.tensor[:, 1] != 0).any(-1).any(-1).sum()) == 6


def test_block_rows_name_each_layers_k_and_v_of_a_page() -> None:
    pool = make_pool()
    pool.tensor.normal_()
    rows = pool.block_rows(torch.tensor([4, 0, 2]))
    for layer in range(3):
        k, v = pool.blocks[rows[layer]]
        assert torch.equal(k.view(3, 4, 2, 8), pool.k(layer)[[4, 0, 2]])
        assert torch.equal(v.view(3, 4, 2, 8), pool.v(layer)[[4, 0, 2]])


def test_copy_page_copies_all_layers() -> None:
    pool = make_pool()
    pool.tensor.normal_()
    pool.copy_page(0, 3)
    assert torch.equal(pool.tensor[3], pool.tensor[0])
    assert not torch.equal(pool.tensor[2], pool.tensor[0])


def test_a_given_storage_is_where_the_pages_are() -> None:
    memory = bytearray(6 * make_pool().page_bytes)
    pool = make_pool(storage=memoryview(memory))
    pool.tensor[4] = 1.0
    assert memory[4 * pool.page_bytes :][: pool.page_bytes] == bytes(pool.page_view(4))
    assert any(memory) and not any(memory[5 * pool.page_bytes :])


def test_a_storage_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="storage must have at least 7680 bytes, got 7679"):
        make_pool(storage=memoryview(bytearray(5 * make_pool().page_bytes - 1)))


def test_own_memory_is_zero_and_takes_room_only_where_used() -> None:
    before = resident_bytes()
    pool = make_pool(num_pages=1 << 17)
    size = pool.num_pages * pool.page_bytes
    assert size > 150 << 20
    pool.tensor[77777] = 1.0
    assert not pool.tensor[77776].any()
    assert resident_bytes() - before < size // 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_is_read_for_its_first_tokens_alone_whatever_follows_them(dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view(pool.tensor.shape))
    whole, part = pool.read_page(2, tokens=4), pool.read_page(2, tokens=3)
    assert whole == bytes(pool.page_view(2))
    pool.tensor[2, :, :, 3] = -1
    assert pool.read_page(2, tokens=3) == part
    assert len(part) == len(whole) * 3 // 4


@pytest.mark.parametrize("spare", [0, 1])
def test_a_pool_on_a_device_has_room_for_a_nonce_behind_its_pages_in_the_same_allocation(spare: int) -> None:
    pool = KVPool(
        5, num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, device="meta", spare_pages=spare
    )
    assert pool.num_pages == 5 and pool.tensor.shape == (5 + spare, 3, 2, 4, 2, 8)
    assert pool.tensor.is_contiguous() and pool.tensor.storage_offset() == 0
    size = (5 + spare) * pool.page_bytes
    assert pool.tensor.untyped_storage().nbytes() == size + NONCE_BYTES
    assert pool.nonce_address == pool.tensor.data_ptr() + size


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096
