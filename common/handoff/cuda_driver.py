"""CudaDriver: the few CUDA driver calls that handing over KV takes, behind a protocol, so that tests need no GPU.

The driver API and not the runtime's: a failed runtime call leaves its error behind for the next check of anybody's launch, and
which device is current would be a question of which copy of the runtime is asked. torch's context is the device's primary one,
which is what is used here.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any, Final, Protocol

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16


class CudaError(RuntimeError):
    """A CUDA call failed. No PdserveError: unless the caller knows that the context is still good, the engine must end."""


class CudaDriver(Protocol):
    """One device's, in one thread. Every call raises CudaError if CUDA says anything but success."""

    def device_uuid(self) -> bytes:
        """UUID_BYTES bytes."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation in which address lies."""

    def ipc_handle(self, base: int) -> bytes:
        """HANDLE_BYTES bytes that another process of this host can open. base: of a plain cudaMalloc allocation."""

    def open_ipc(self, handle: bytes) -> int:
        """Maps another process's allocation into this device's context, peer access included; its base here."""

    def close_ipc(self, base: int) -> None:
        """Unmaps, once for each open_ipc."""

    def check_access(self, address: int) -> None:
        """Kernels of this device can use address; else raises."""

    def read(self, address: int, size: int) -> bytes:
        """Device to host; waits for it."""

    def write(self, address: int, data: bytes) -> None:
        """Host to device; waits for it."""

    def synchronize(self) -> None:
        """Waits for everything this process has queued on the device. Raises also what an earlier kernel met."""


class CudaBindings:
    """The CudaDriver of cuda-bindings. Make it in the thread that will use it."""

    def __init__(self, device_index: int) -> None:
        """device_index: as torch counts, among the visible devices."""
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device_index)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxSetCurrent", self._context)

    def device_uuid(self) -> bytes:
        return bytes(self._call("cuDeviceGetUuid", self._device).bytes)

    def allocation_of(self, address: int) -> tuple[int, int]:
        base, size = self._call("cuMemGetAddressRange", address)
        return int(base), int(size)

    def ipc_handle(self, base: int) -> bytes:
        return ctypes.string_at(int(self._call("cuIpcGetMemHandle", base).getPtr()), HANDLE_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        # Through its memory: the attribute for the bytes has come and gone between versions of cuda-bindings.
        copy = self._driver.CUipcMemHandle()
        ctypes.memmove(int(copy.getPtr()), handle, HANDLE_BYTES)
        # The mapping belongs to the context that is current: in the owner's, kernels of this device could not reach it.
        self._call("cuCtxSetCurrent", self._context)
        return int(self._call("cuIpcOpenMemHandle", copy, int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))

    def close_ipc(self, base: int) -> None:
        self._call("cuIpcCloseMemHandle", base)

    def check_access(self, address: int) -> None:
        self._call("cuPointerGetAttribute", self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER, address)

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH", ctypes.addressof(buffer), address, size)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(buffer), len(data))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's results: None, the only one, or all of them."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise CudaError(f"{name} failed: {getattr(status, 'name', status)}")
        if len(results) > 1:
            return results
        return results[0] if results else None


def is_cuda_fault(error: BaseException) -> bool:
    """Whether this is CUDA's error, whoever raised it: this module, torch or Triton. After one in a launch or a wait the
    process's context is of no use any more."""
    text = str(error)
    return isinstance(error, CudaError) or "CUDA error" in text or "Triton Error [CUDA]" in text
