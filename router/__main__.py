"""python -m router: takes requests, assigns each to a prefill and a decode worker, streams the answers.

Workers find it by themselves (--router of theirs); it starts without any and is ready when a compatible pair has registered.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common import early_end

    early_end.begin()

from common.config import parse_config
from common.environment import warn_of_strangers
from common.logs import configure
from common.rpc.process import run_process
from router.config import RouterConfig
from router.server import serve

if __name__ == "__main__":
    config = parse_config(RouterConfig, prog="python -m router", description=__doc__ or "")
    configure("router", config.log_level, config.log_format)
    warn_of_strangers(RouterConfig)
    run_process(lambda stop: serve(config, stop))
