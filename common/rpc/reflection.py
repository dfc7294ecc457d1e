"""Server reflection, by both of its names: v1alpha, which the library has, and v1, which newer clients ask first or alone. They
differ in nothing but the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

ALPHA: Final = "grpc.reflection.v1alpha"
STABLE: Final = "grpc.reflection.v1"
SERVICES: Final = tuple(f"{package}.ServerReflection" for package in (ALPHA, STABLE))


def enable_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """services: full names of those that are listed, besides these two."""
    describe_stable()
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICES))
    for name in SERVICES:
        method: Any = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def describe_stable() -> FileDescriptor:
    """So that v1 is described, too. Idempotent."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = file.name.replace("v1alpha", "v1"), STABLE
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(ALPHA, STABLE)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(ALPHA, STABLE)
        method.output_type = method.output_type.replace(ALPHA, STABLE)
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)
