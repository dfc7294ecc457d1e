"""GenerationService: convert, call, convert."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import grpc

from common.rpc.auth import who_calls
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from common.rpc.gen.pdserve.v1 import generation_pb2_grpc
from common.version import VERSION
from router.caller import Caller, CallerKeys
from router.cluster_view import ClusterView
from router.fleet.fleet import Fleet
from router.pipeline import Pipeline
from router.served_model import ServedModel

FLUSH_TIMEOUT = timedelta(seconds=5)
Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(
        self, pipeline: Pipeline, *, model: ServedModel, fleet: Fleet, caller_keys: CallerKeys, view: ClusterView
    ) -> None:
        self._pipeline = pipeline
        self._model = model
        self._fleet = fleet
        self._caller_keys = caller_keys
        self._view = view

    async def Generate(self, request: pb2.GenerateRequest, context: Context) -> None:
        # Not an async generator: a cancelled one is closed later, by whoever collects it, and its clean-up with it (CAN-11).
        await self._pipeline.generate(request, context.write, caller=self._caller_of(context))

    def _caller_of(self, context: Context) -> Caller:
        metadata = context.invocation_metadata() or ()
        now, time_left = time.monotonic(), context.time_remaining()
        return Caller.of(metadata, self._caller_keys, now=now, time_left=time_left, client=who_calls().client)

    async def Abort(self, request: pb2.AbortRequest, context: Context) -> pb2.AbortResponse:
        who = who_calls()
        return pb2.AbortResponse(found=self._pipeline.abort(request.request_id, client=None if who.is_operator else who.client))

    async def GetModel(self, request: pb2.GetModelRequest, context: Context) -> pb2.GetModelResponse:
        folder, limits = self._model.folder, self._pipeline.limits
        workers = self._fleet.registry.live
        shared = workers[0].profile.compatibility if workers else None
        return pb2.GetModelResponse(
            name=folder.name,
            path=str(folder.path),
            fingerprint=self._model.fingerprint,
            dtype=shared.dtype if shared else "",
            vocab_size=limits.vocab_size,
            max_context=limits.max_context,
            max_prompt_tokens=limits.max_prompt_tokens,
            eos_token_ids=folder.eos_token_ids,
            has_chat_template=self._model.takes_chats,
            page_size=shared.page_size if shared else 0,
            version=VERSION,
        )

    async def Tokenize(self, request: pb2.TokenizeRequest, context: Context) -> pb2.TokenizeResponse:
        return pb2.TokenizeResponse(token_ids=await self._model.tokenize(request))

    async def Detokenize(self, request: pb2.DetokenizeRequest, context: Context) -> pb2.DetokenizeResponse:
        return pb2.DetokenizeResponse(text=await self._model.detokenize(request))

    async def GetCluster(self, request: pb2.GetClusterRequest, context: Context) -> pb2.GetClusterResponse:
        return self._view.to_pb()

    async def FlushCache(self, request: pb2.FlushCacheRequest, context: Context) -> pb2.FlushCacheResponse:
        return pb2.FlushCacheResponse(pages_freed=await self._fleet.flush_prefix_caches(timeout=FLUSH_TIMEOUT))
