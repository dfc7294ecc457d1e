"""Counting GPUs as CUDA would, without it."""

from __future__ import annotations

import pytest

from deploy.gpus import count_gpus


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,1", 2), ("0, 3", 2), ("0,7,1", 1), ("GPU-1234,GPU-5678", 2), ("0,-1,1", 1)],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, count: int) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(env=env, list_gpus=lambda: 4) == count


def test_no_more_are_counted_than_are_here() -> None:
    assert count_gpus(env={"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, list_gpus=lambda: 1) == 1
    assert count_gpus(env={"CUDA_VISIBLE_DEVICES": "0"}, list_gpus=lambda: 0) == 0
