"""Capturing launches as CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def capture(body: Callable[[], T], pool: Any) -> tuple[T, Callable[[], None]]:
    """What body gave, whose tensors stay where they are, and what launches it again. pool: of the graphs' memory.

    body has been run before, so that it compiles and loads nothing now. Inside uncollected()."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        result = body()
    return result, graph.replay


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected inside the block: it may hold memory or graphs of a GPU, and freeing those ends a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
