"""ModelRunner: the model, its KV pool and page table behind one call, launch(batch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypedDict

import torch

from common.core import Batch, Context, Req, set_global_ctx
from common.engine import kv_pool
from common.engine.attention import TorchAttention
from common.engine.kv_pool import KVPool
from common.engine.layers import can_pack
from common.engine.model_config import LlamaConfig
from common.engine.models.llama import Llama
from common.engine.page_table import PageTable
from common.engine.peer_store import PeerStore
from common.engine.sampler import Sampled, Sampler, SampleRow
from common.engine.weights import DummyWeights, Progress, SafetensorsWeights, WeightSource
from common.errors import StartError
from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from common.work import Compatibility

__all__ = ["EngineConfig", "ModelRunner", "Pending", "Runner", "Sampled", "page_bytes"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """model: a Hugging Face folder.
    max_context: tokens of one request; cut to the model's. None: the model's.
    table_rows: requests that may have a page table row at once.
    threads: of torch within one operation; None: torch's default, one per core.
    load_format: "dummy" makes random weights of the config's shape and needs no weight files, for benchmarks.
    """

    model: Path
    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 16
    pool_pages: int
    max_context: int | None = None
    table_rows: int
    threads: int | None = None
    load_format: Literal["safetensors", "dummy"] = "safetensors"


class Pending(Protocol):
    """A launched step, whose tokens may not be there yet."""

    def result(self) -> list[list[Sampled]]:
        """Waits for the device. Per request of the batch, in order: nothing unless its last chunk was computed, else n tokens,
        for completions completion, completion + 1, ... May be called once; steps are asked in the order of their launch."""


class Runner(Protocol):
    """What the workers' loops see of the model. Used by the engine thread only.

    lookahead: launched steps whose results may be outstanding when the next one is launched. 0: launch() computes at once. 1: the
    device computes step N+1 while the host reads step N.
    """

    compatibility: Compatibility
    eos_token_ids: frozenset[int]
    page_table: PageTable
    pool: KVPool
    lookahead: int

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        """One forward pass over tokens [cached_len, device_len) of every request, whose page table rows reach that far; what it
        samples is at output index device_len - prompt_len.

        Fills the batch's open fields. The requests are not changed, and may be as soon as this has returned: complete_one or
        complete_chunk at once, append_host when the token is there. So with lookahead 1 a decoding request may come with
        device_len = len(input_ids) + 1: its last token is on the device only, in its page table row's slot, which step N
        filled. Pages and the row of a request stay its own until its last launched step's result was read.
        stores: requests whose KV the kernels also store in a peer's pool; complete there once the result is read."""

    def run(self, batch: Batch) -> list[list[Sampled]]:
        """launch(batch).result()."""


class _Computed(NamedTuple):
    """A Pending of a step that is already done."""

    tokens: list[list[Sampled]]

    def result(self) -> list[list[Sampled]]:
        return self.tokens


class ModelRunner:
    """The Runner of a real model. Owns the process's Context: one per process."""

    lookahead = 0

    def __init__(
        self,
        model: Llama,
        *,
        compatibility: Compatibility,
        eos_token_ids: frozenset[int],
        page_table: PageTable,
        pool: KVPool,
        dtype: torch.dtype,
    ) -> None:
        self.compatibility = compatibility
        self.eos_token_ids = eos_token_ids
        self.page_table = page_table
        self.pool = pool
        self._model = model
        self._sampler = Sampler(eos_token_ids)
        self._ctx = Context(page_size=page_table.page_size)
        self._ctx.page_table = page_table.tensor
        self._ctx.kv_cache = pool
        config = model.config
        self._ctx.attn_backend = TorchAttention(
            self._ctx, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype
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
        """Raises StartError, one line, for whatever is wrong with the model folder or does not fit this engine.

        pool_storage: where the KV pool's pages are to be, at least pool_pages * page_bytes(...). progress: gets a line now and
        then. Call it in the thread that will run the model."""
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        is_dummy = config.load_format == "dummy"
        folder = ModelDir.open(config.model, need_weights=not is_dummy, need_tokenizer=not is_dummy)
        shape, dtype, device = LlamaConfig.of(folder), _dtype(config.dtype), config.device
        max_context = _effective_context(config, shape, progress)
        weights: WeightSource = DummyWeights(dtype=dtype, device=device)
        if not is_dummy:
            weights = SafetensorsWeights(folder, dtype=dtype, device=device)
        with torch.inference_mode():
            model = Llama(shape, weights, max_context=max_context, dtype=dtype, device=device, progress=Progress(progress))
        if device == "cpu" and not can_pack(dtype, torch.device(device)):
            progress(f"no oneDNN products in {config.dtype} on this machine: the slower ones of plain torch are used")
        geometry = _kv_geometry(shape)
        return cls(
            model,
            compatibility=Compatibility(
                fingerprint(folder), config.dtype, page_size=config.page_size, max_context=max_context, **geometry
            ),
            eos_token_ids=frozenset(folder.eos_token_ids),
            page_table=PageTable(config.table_rows, max_context, page_size=config.page_size, device=device),
            pool=KVPool(
                config.pool_pages, page_size=config.page_size, dtype=dtype, device=device, storage=pool_storage, **geometry
            ),
            dtype=dtype,
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


def page_bytes(model: Path, *, page_size: int, dtype: str) -> int:
    """Bytes of one KV page of this model, for sizing a pool before it is made. Raises StartError."""
    shape = LlamaConfig.of(ModelDir.open(model, need_weights=False, need_tokenizer=False))
    return kv_pool.page_bytes(page_size=page_size, dtype=_dtype(dtype), **_kv_geometry(shape))


class _KvGeometry(TypedDict):
    num_layers: int
    num_kv_heads: int
    head_dim: int


def _kv_geometry(shape: LlamaConfig) -> _KvGeometry:
    return {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}


def _effective_context(config: EngineConfig, shape: LlamaConfig, progress: Callable[[str], None]) -> int:
    """The lesser of what is asked for and what the model was made for; says so if it was cut, or if the pool is smaller still.

    The pool does not cut it: pools may differ between workers that work together, their context may not. The router knows both.
    """
    in_pool = config.pool_pages * config.page_size
    wanted = config.max_context or shape.max_context
    possible = min(wanted, shape.max_context)
    if possible < wanted:
        progress(f"max context is {possible} tokens, the model's, not {wanted}")
    if in_pool < possible:
        progress(f"the pool holds {in_pool} tokens, less than the max context of {possible}: longer requests will be refused")
    return possible


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise StartError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]
