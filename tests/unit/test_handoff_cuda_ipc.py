"""A pool in GPU memory is exported, mapped, proved by its nonce and unmapped; whatever CUDA refuses is a clean error."""

from __future__ import annotations

import ctypes
import sys
import types
from dataclasses import replace
from enum import IntEnum
from typing import Any

import pytest

from common.errors import FailedPrecondition
from common.handoff.base import page_range
from common.handoff.cuda_driver import CudaBindings, CudaError, is_cuda_fault
from common.handoff.cuda_ipc import NONCE_BYTES, PoolExport, export_pool, open_pool
from common.handoff.pool_memory import PoolMemory
from tests.helpers.fake_cuda import FakeCuda, cuda_pool

pytestmark = pytest.mark.unit
PAGE_BYTES = 48


def pool(num_pages: int = 4) -> tuple[FakeCuda, PoolMemory, PoolExport]:
    owner = FakeCuda()
    memory, export = cuda_pool(owner, num_pages=num_pages, page_bytes=PAGE_BYTES)
    return owner, memory, export


def test_what_is_written_through_a_mapping_lies_in_the_owners_pool() -> None:
    _, memory, export = pool()
    sender = FakeCuda()
    mapped = open_pool(export, sender)
    assert mapped.pool_bytes == 4 * PAGE_BYTES
    sender.write(mapped.base + page_range(2, PAGE_BYTES).start, b"x" * PAGE_BYTES)
    assert bytes(memory.page_view(2)) == b"x" * PAGE_BYTES
    mapped.close()
    assert sender.num_mapped == 0


def test_a_pool_in_the_middle_of_its_allocation_is_found_by_its_offset() -> None:
    owner, memory = FakeCuda(), PoolMemory(4, PAGE_BYTES)
    base = owner.adopt(memory)
    export = export_pool(owner, pool_address=base + PAGE_BYTES, pool_bytes=PAGE_BYTES, nonce_address=base + 3 * PAGE_BYTES)
    sender = FakeCuda()
    mapped = open_pool(export, sender)
    sender.write(mapped.base, b"y")
    assert bytes(memory.page_view(1))[:1] == b"y"


def test_a_nonce_outside_of_the_pools_allocation_is_not_exported() -> None:
    owner, memory = FakeCuda(), PoolMemory(2, PAGE_BYTES)
    base = owner.adopt(memory)
    with pytest.raises(CudaError, match="not in one"):
        export_pool(owner, pool_address=base, pool_bytes=PAGE_BYTES, nonce_address=base + 2 * PAGE_BYTES - NONCE_BYTES + 1)
    with pytest.raises(ValueError, match="is none"):
        export_pool(owner, pool_address=base, pool_bytes=PAGE_BYTES, nonce_address=base + PAGE_BYTES - 1)


def test_another_nonce_is_not_this_pool_and_is_unmapped_again() -> None:
    _, _, export = pool()
    sender = FakeCuda()
    with pytest.raises(FailedPrecondition, match="nonce differs"):
        open_pool(replace(export, nonce=bytes(NONCE_BYTES)), sender)
    assert sender.num_mapped == 0


@pytest.mark.parametrize("call", ["open_ipc", "check_access", "read"])
def test_a_call_that_cuda_refuses_is_a_clean_error_and_leaves_nothing_mapped(call: str) -> None:
    _, _, export = pool()
    sender = FakeCuda()
    sender.fails = {call}
    with pytest.raises(FailedPrecondition, match=f"cannot be mapped: {call} failed"):
        open_pool(export, sender)
    assert sender.num_mapped == 0
    sender.fails = set()
    open_pool(export, sender).close()


def test_a_context_that_was_lost_before_is_no_refusal() -> None:
    _, _, export = pool()
    sender = FakeCuda()
    sender.is_lost = True
    with pytest.raises(CudaError):
        open_pool(export, sender)


def test_kernels_are_waited_for_before_the_mapping_goes() -> None:
    _, _, export = pool()
    sender = FakeCuda()
    mapped = open_pool(export, sender)
    sender.calls.clear()
    mapped.close()
    assert sender.calls == ["synchronize", "close_ipc"]
    mapped = open_pool(export, sender)
    sender.fails = {"synchronize"}
    with pytest.raises(CudaError):
        mapped.close()
    assert sender.num_mapped == 1, "a kernel may still write: it must not be said to be unmapped"


@pytest.mark.parametrize("wrong", [{"handle": b"x"}, {"nonce": b""}, {"device_uuid": b"1"}, {"offset": -1}, {"pool_bytes": 0}])
def test_what_cannot_be_an_export_is_refused(wrong: dict[str, Any]) -> None:
    _, _, export = pool()
    with pytest.raises(ValueError, match=r"must be|is none"):
        replace(export, **wrong)


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217


class Handle:
    """As in cuda-bindings 13.5, where only its address is to be had."""

    def __init__(self, content: bytes = bytes(64)) -> None:
        self._buffer = ctypes.create_string_buffer(content, 64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._buffer)


def fake_bindings(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> list[tuple[Any, ...]]:
    """A module in the place of cuda.bindings.driver; what is called there."""
    calls: list[tuple[Any, ...]] = []
    module = types.ModuleType("cuda.bindings.driver")
    known = {"cuInit": (), "cuDeviceGet": (7,), "cuDevicePrimaryCtxRetain": ("primary",), "cuCtxSetCurrent": ()} | answers

    def define(name: str, answer: Any) -> None:
        def call(*arguments: Any) -> tuple[Any, ...]:
            calls.append((name, *arguments))
            return (answer,) if isinstance(answer, Status) else (Status.CUDA_SUCCESS, *answer)

        setattr(module, name, call)

    for name, answer in known.items():
        define(name, answer)
    module.CUipcMemHandle = Handle  # type: ignore[attr-defined]
    module.CUipcMem_flags = types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)  # type: ignore[attr-defined]
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    return calls


def test_the_bindings_carry_a_handles_bytes_and_open_in_the_senders_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(192, 256))
    calls = fake_bindings(monkeypatch, cuIpcGetMemHandle=(Handle(content),), cuIpcOpenMemHandle=(0x7000,))
    driver = CudaBindings(1)
    assert driver.ipc_handle(0x5000) == content
    assert driver.open_ipc(content) == 0x7000
    assert ("cuDeviceGet", 1) in calls
    name, handle, flags = calls[-1]
    assert (name, flags, ctypes.string_at(handle.getPtr(), 64)) == ("cuIpcOpenMemHandle", 1, content)
    assert calls[-2] == ("cuCtxSetCurrent", "primary")


def test_every_status_of_the_bindings_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Status.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    fake_bindings(
        monkeypatch, cuIpcOpenMemHandle=refused, cuCtxSynchronize=refused, cuMemcpyDtoH=refused, cuMemGetAddressRange=refused
    )
    driver = CudaBindings(0)
    for call in (
        lambda: driver.open_ipc(bytes(64)),
        driver.synchronize,
        lambda: driver.read(1, 4),
        lambda: driver.allocation_of(1),
    ):
        with pytest.raises(CudaError, match="CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
            call()


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (CudaError("cuCtxSynchronize failed"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (AssertionError("page 3 has two owners"), False),
    ],
)
def test_a_lost_context_is_told_from_other_ends_of_an_engine(error: Exception, is_fault: bool) -> None:
    assert is_cuda_fault(error) is is_fault
