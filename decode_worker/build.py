"""The decode worker's Runner, by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from common.by_device import is_cuda
from common.engine.config import EngineConfig
from common.engine.load import load_model
from common.engine.memory import tell_use
from common.engine.runner import ModelRunner, Runner

if TYPE_CHECKING:
    from decode_worker.grammar_masks import MaskSource


def build_runner(
    config: EngineConfig,
    pool_storage: memoryview | None,
    progress: Callable[[str], None],
    *,
    masks: MaskSource | None = None,
) -> Runner:
    """Raises StartError. Call it in the thread that will run the model. pool_storage: see ModelRunner; on the CPU only.
    masks: see GraphRunner; on a GPU only."""
    loaded = load_model(config, progress)
    if not is_cuda(config.device):
        return ModelRunner.build(loaded, config, pool_storage=pool_storage, progress=progress)
    # Imported when asked for: they need what only a machine with a GPU has.
    from common.engine.cuda.build import build_cuda_runner
    from decode_worker.graph_runner import GraphRunner

    runner = build_cuda_runner(loaded, config, progress)
    capture = len(config.graph_sizes) > 0 and runner.attention.decode.can_capture
    graphs = GraphRunner(runner, sizes=config.graph_sizes, capture=capture, progress=progress, masks=masks)
    tell_use(config, progress)
    return graphs
