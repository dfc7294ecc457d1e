"""Token ids of a request in host memory: a tensor where an engine computes with them, a plain array where it only simulates one.

Both have a length, slices and tolist(), which is all that schedulers use; what makes or extends them is here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

MakeIds = Callable[[Sequence[int]], Any]
"""Token ids as a Req holds them (Req.input_ids)."""


def tensor_ids(ids: Sequence[int]) -> Any:
    """[len] int32 on the CPU."""
    import torch

    return torch.tensor(ids, dtype=torch.int32)


def plain_ids(ids: Sequence[int]) -> Any:
    """The same without torch."""
    return array("i", ids)


def with_id(ids: Any, token_id: int) -> Any:
    """A copy with one id more, of the same kind."""
    if isinstance(ids, array):
        return ids + array("i", (token_id,))
    import torch

    return torch.cat([ids, torch.tensor([token_id], dtype=torch.int32)])
