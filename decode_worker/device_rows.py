"""DeviceRows: what a captured decode step reads and advances of each running request, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.core import Req
from common.engine.cuda.sampling_state import SamplingState
from common.engine.cuda.upload import UploadRing


class DeviceRows:
    """Engine thread only. A request's row is its page table row (req.table_idx); the last row is padding's.

    token: [rows + 1] int32, the next step's input; device_len: [rows + 1] int32, tokens it attends to, itself included.
    The captured step advances both; the host writes a row only when a request joins.
    """

    def __init__(self, rows: int, *, sampling: SamplingState, device: torch.device) -> None:
        self.token = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.device_len = torch.ones(rows + 1, dtype=torch.int32, device=device)
        self._sampling = sampling
        self._resident: list[Req | None] = [None] * rows
        self._uploads = UploadRing(3 * rows, dtype=torch.int32, device=device)

    def admit(self, reqs: Sequence[Req]) -> None:
        """Loads those that are not on the device yet, in the order of the current stream. Their last token has no KV."""
        newcomers = [req for req in reqs if self._resident[req.table_idx] is not req]
        if not newcomers:
            return
        for req in newcomers:
            assert req.extend_len == 1 and req.is_last_chunk, f"{req!r} is not ready to decode"
            self._resident[req.table_idx] = req
            self._sampling.load(req.table_idx, req, req.completion)
        self._sampling.flush()
        values = [(req.table_idx, int(req.input_ids[-1]), req.device_len) for req in newcomers]
        uploaded = self._uploads.upload(np.array(values, dtype=np.int32).T.ravel()).view(3, -1)
        rows = uploaded[0].long()
        self.token.index_copy_(0, rows, uploaded[1])
        self.device_len.index_copy_(0, rows, uploaded[2])
