"""KVPool: the bytes of a worker's KV pages. Which page belongs to whom is PagePool's business (common/engine/pages.py).

One tensor, page-first, so that a page over all layers is one block (what a handoff sends) and one layer's K or V of a page is one
block too (what attention reads):

    [num_pages, num_layers, 2 (K, V), page_size, num_kv_heads, head_dim]
"""

from __future__ import annotations

import mmap

import torch

from common.handoff.cuda_ipc import NONCE_BYTES


class KVPool:
    """Not thread-safe, but for page_view: another thread may read or write a page that nothing else touches meanwhile.

    tensor: the whole pool. page_bytes: one page over all layers.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        storage: memoryview | None = None,
        spare_pages: int = 0,
    ) -> None:
        """spare_pages: beyond num_pages, for padding; nobody's, and not on the CPU.
        storage: writable bytes to live in, at least num_pages * page_bytes; None: own memory, zero and not touched before use.
        Raises ValueError if storage is too small, or given for a device other than the CPU."""
        shape = (num_pages + spare_pages, num_layers, 2, page_size, num_kv_heads, head_dim)
        self.num_pages = num_pages
        self.page_size = page_size
        self.page_bytes = page_bytes(
            num_layers=num_layers, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
        self._bytes: memoryview | None = None
        if torch.device(device).type == "cpu":
            self._bytes = _storage_bytes(storage, num_pages * self.page_bytes)
            self.tensor = torch.frombuffer(self._bytes, dtype=dtype).view(shape)
        elif storage is not None:
            raise ValueError(f"storage must be None on device {device}")
        else:
            # One allocation with room behind the pool for the nonce by which another process knows that it mapped the right one.
            size = (num_pages + spare_pages) * self.page_bytes
            raw = torch.zeros(size + NONCE_BYTES, dtype=torch.uint8, device=device)
            self.tensor = raw[:size].view(dtype).view(shape)
        self._token_rows = self.tensor.view(-1, num_kv_heads * head_dim)
        """[every page's, layer's, K's and V's tokens, num_kv_heads * head_dim]"""
        self.blocks = self.tensor.view(-1, page_size * num_kv_heads * head_dim)
        """Row (page * num_layers + layer) * 2 + (0 for K, 1 for V): one layer's K or V of one page."""
        kv_blocks = torch.arange(num_layers * 2, device=device).view(num_layers, 2, 1)
        self._block_of_layer = kv_blocks
        self._row_of_layer = kv_blocks * page_size

    @property
    def nonce_address(self) -> int:
        """Where the NONCE_BYTES behind the pool and its spare pages are. On a GPU only."""
        assert self._bytes is None, "a pool in host memory has no nonce"
        return self.tensor.data_ptr() + self.tensor.nbytes

    def page_view(self, page: int) -> memoryview:
        """The writable bytes of one page, all layers. CPU only; raises IndexError for an unknown page."""
        assert self._bytes is not None, "a page's bytes can be viewed on the CPU only"
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page must be in [0, {self.num_pages}), got {page}")
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    def read_page(self, page: int, *, tokens: int) -> bytes:
        """See ReadPage. On any device; waits for it and for all that is queued there."""
        return self.tensor[page, :, :, :tokens].contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def k(self, layer: int) -> torch.Tensor:
        """[num_pages, page_size, num_kv_heads, head_dim], a view."""
        return self.tensor[:, layer, 0]

    def v(self, layer: int) -> torch.Tensor:
        """[num_pages, page_size, num_kv_heads, head_dim], a view."""
        return self.tensor[:, layer, 1]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None:
        """k, v: [tokens, num_kv_heads, head_dim]; out_loc: [tokens] token locations (page * page_size + offset)."""
        self.store_rows(k, v, self.token_rows(out_loc)[layer])

    def token_rows(self, out_loc: torch.Tensor) -> torch.Tensor:
        """[num_layers, 2, tokens] int64: where each layer's K and V of the tokens at these locations are; for store_rows."""
        page, offset = out_loc // self.page_size, out_loc % self.page_size
        pages_first_row = page * (self._row_of_layer.numel() * self.page_size)
        return (pages_first_row + offset) + self._row_of_layer

    def store_rows(self, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> None:
        """Like store, for rows = token_rows(out_loc)[layer], so that a step computes them once for all layers."""
        self._token_rows.index_copy_(0, rows[0], k.reshape(k.shape[0], -1))
        self._token_rows.index_copy_(0, rows[1], v.reshape(v.shape[0], -1))

    def block_rows(self, pages: torch.Tensor) -> torch.Tensor:
        """[num_layers, 2, pages] int64: the rows of blocks that hold each layer's K and V of these pages ([pages])."""
        return pages * self._block_of_layer.numel() + self._block_of_layer

    def copy_page(self, src: int, dst: int) -> None:
        """Copies all layers of one page, and waits for it: either may have another owner right afterwards, who writes without
        asking this device's stream."""
        self.tensor[dst].copy_(self.tensor[src])
        if self.tensor.is_cuda:
            torch.cuda.current_stream(self.tensor.device).synchronize()


def page_bytes(*, num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return num_layers * 2 * page_size * num_kv_heads * head_dim * dtype.itemsize


def _storage_bytes(storage: memoryview | None, size: int) -> memoryview:
    if storage is None:
        # An anonymous mapping: zero, so that no masked-out slot can hold a NaN, and resident only where it was used.
        return memoryview(mmap.mmap(-1, size))
    storage = storage.cast("B")
    if len(storage) < size:
        raise ValueError(f"storage must have at least {size} bytes, got {len(storage)}")
    return storage[:size]
