"""Every RPC a server offers, from its descriptors: a new one is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from common.rpc import reflection
from common.rpc.gen.pdserve import v1


def _files() -> Iterator[Any]:
    for found in pkgutil.iter_modules(v1.__path__):
        if found.name.endswith("_pb2"):
            yield importlib.import_module(f"{v1.__name__}.{found.name}").DESCRIPTOR
    yield from (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR, reflection.describe_stable())


FILES: tuple[FileDescriptor, ...] = tuple(_files())
ROLES = {
    "router": ("pdserve.v1.GenerationService", "pdserve.v1.RegistryService"),
    "prefill": ("pdserve.v1.PrefillService",),
    "decode": ("pdserve.v1.DecodeService", "pdserve.v1.HandoffService"),
}
ON_ALL = ("grpc.health.v1.Health", *reflection.SERVICES)


class Rpc(NamedTuple):
    """path: /package.Service/Method."""

    path: str
    request: type[Any]
    response: type[Any]
    client_streams: bool
    server_streams: bool

    @classmethod
    def of(cls, method: MethodDescriptor) -> Rpc:
        return cls(
            f"/{method.containing_service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
            method.client_streaming,
            method.server_streaming,
        )

    @property
    def service(self) -> str:
        return self.path.split("/")[1]

    @property
    def kind(self) -> str:
        return ("stream" if self.client_streams else "unary") + ("_stream" if self.server_streams else "_unary")

    def method(self, channel: grpc.aio.Channel) -> Any:
        """Takes and gives plain bytes."""
        return getattr(channel, self.kind)(self.path)


def rpcs() -> list[Rpc]:
    return [Rpc.of(method) for file in FILES for service in file.services_by_name.values() for method in service.methods]


def rpcs_of(role: str) -> list[Rpc]:
    """Those that a process of this role serves."""
    return [rpc for rpc in rpcs() if rpc.service in ROLES[role] or rpc.service in ON_ALL]


async def status_of(channel: grpc.aio.Channel, rpc: Rpc, *, metadata: Any = None, timeout: float = 5) -> grpc.StatusCode:
    """The status of a call with one empty message, or none if it streams; a stream that opens and stays is OK."""
    call = rpc.method(channel)(*([] if rpc.client_streams else [b""]), metadata=metadata, timeout=timeout)
    try:
        if rpc.client_streams:
            await call.done_writing()
        if rpc.server_streams:
            await call.read()
            call.cancel()
            return grpc.StatusCode.OK
        await call
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code


def services_without_role() -> Iterator[str]:
    known = {*ON_ALL, *(service for services in ROLES.values() for service in services)}
    return (rpc.service for rpc in rpcs() if rpc.service not in known)
