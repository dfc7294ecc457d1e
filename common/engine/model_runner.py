"""ModelRunner: the Runner of a real model on the CPU, and what a real model's Runner has beyond the seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from common.core import Batch, Context, Req, set_global_ctx
from common.engine.attention import TorchAttention
from common.engine.config import EngineConfig
from common.engine.kv_pool import KVPool
from common.engine.load import LoadedModel, load_model, page_bytes
from common.engine.memory import size_pool
from common.engine.page_table import PageTable
from common.engine.peer_store import PeerStore
from common.engine.runner import Pending, Runner, Sampled
from common.engine.sampler import Sampler, SampleRow

__all__ = ["EngineConfig", "ModelRunner", "TensorRunner", "page_bytes"]


class TensorRunner(Runner, Protocol):
    """A Runner whose KV and page table are tensors."""

    @property
    def page_table(self) -> PageTable: ...
    @property
    def pool(self) -> KVPool: ...


class _Computed(NamedTuple):
    """A Pending of a step that is already done."""

    tokens: list[list[Sampled]]

    def result(self) -> list[list[Sampled]]:
        return self.tokens


class ModelRunner:
    """The Runner of a real model. Owns the process's Context: one per process."""

    lookahead = 0

    def __init__(self, loaded: LoadedModel, *, page_table: PageTable, pool: KVPool) -> None:
        self.compatibility = loaded.compatibility
        self.eos_token_ids = loaded.eos_token_ids
        self.page_table = page_table
        self.pool = pool
        self._model = loaded.model
        self._sampler = Sampler(loaded.eos_token_ids)
        self._ctx = Context(page_size=page_table.page_size)
        self._ctx.page_table = page_table.tensor
        self._ctx.kv_cache = pool
        shape = loaded.shape
        self._ctx.attn_backend = TorchAttention(
            self._ctx, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=loaded.dtype
        )
        set_global_ctx(self._ctx)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        pool_storage: memoryview | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> ModelRunner:
        """load_model, then build."""
        return cls.build(load_model(config, progress), config, pool_storage=pool_storage, progress=progress)

    @classmethod
    def build(
        cls, loaded: LoadedModel, config: EngineConfig, *, pool_storage: memoryview | None, progress: Callable[[str], None]
    ) -> ModelRunner:
        """Raises StartError if the pool would hold no page.

        pool_storage: where the KV pool's pages are to be, at least pool_pages * page_bytes(...); None: own memory."""
        pages = size_pool(config, page_bytes=loaded.page_bytes(config.page_size))
        context = loaded.compatibility.max_context
        # The pool does not cut the context: pools of workers that work together may differ, their context may not.
        if (in_pool := pages * config.page_size) < context:
            progress(f"the pool holds {in_pool} tokens, less than the max context of {context}: longer requests will be refused")
        return cls(
            loaded,
            page_table=PageTable(config.table_rows, context, page_size=config.page_size, device=config.device),
            pool=KVPool(
                pages,
                page_size=config.page_size,
                dtype=loaded.dtype,
                device=config.device,
                storage=pool_storage,
                **loaded.kv_geometry,
            ),
        )

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        assert not stores, "this runner stores into its own pool alone"
        with torch.inference_mode():
            self._prepare(batch)
            with self._ctx.forward_batch(batch):
                logits = self._model.forward()
            return _Computed(self._sample(batch.reqs, logits))

    def run(self, batch: Batch) -> list[list[Sampled]]:
        return self.launch(batch).result()

    def _prepare(self, batch: Batch) -> None:
        batch.padded_reqs = batch.reqs
        table = self.page_table.tensor
        if all(req.extend_len == 1 for req in batch.reqs):
            positions = [req.cached_len for req in batch.reqs]
            ids = [int(req.input_ids[position]) for req, position in zip(batch.reqs, positions, strict=True)]
            batch.input_ids = torch.tensor(ids, dtype=torch.int32, device=table.device)
            batch.positions = torch.tensor(positions, device=table.device)
            rows = torch.tensor([req.table_idx for req in batch.reqs], device=table.device)
            batch.out_loc = table[rows, batch.positions].long()
        else:
            spans = [(req, req.cached_len, req.device_len) for req in batch.reqs]
            batch.input_ids = torch.cat([req.input_ids[start:end] for req, start, end in spans]).to(table.device)
            batch.positions = torch.cat([torch.arange(start, end, device=table.device) for _, start, end in spans])
            batch.out_loc = torch.cat([table[req.table_idx, start:end] for req, start, end in spans]).long()
        self._ctx.attn_backend.prepare_metadata(batch)

    def _sample(self, reqs: list[Req], logits: torch.Tensor) -> list[list[Sampled]]:
        """logits: one row per request with is_last_chunk, in order."""
        last = [req for req in reqs if req.is_last_chunk]
        rows = [SampleRow(req, row, req.completion + i) for row, req in enumerate(last) for i in range(req.n)]
        sampled = iter(self._sampler.sample(logits, rows))
        return [[next(sampled) for _ in range(req.n)] if req.is_last_chunk else [] for req in reqs]
