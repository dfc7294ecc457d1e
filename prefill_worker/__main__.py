"""python -m prefill_worker: computes prompts' KV cache and hands it, with the first token, to decode workers.

It joins the routers it is told of and takes what they submit; start-up order does not matter.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common import early_end

    early_end.begin()

from common.config import parse_config
from common.engine.threads import limit_spinning
from common.environment import warn_of_strangers
from common.logs import configure
from common.rpc.process import run_process
from prefill_worker.config import Config


def main() -> None:
    config = parse_config(Config, prog="python -m prefill_worker", description=__doc__ or "")
    configure("prefill", config.log_level, config.log_format)
    warn_of_strangers(Config)
    limit_spinning()
    # Only now: importing it takes time, and --help and a wrong flag need none of it.
    from prefill_worker.server import serve

    run_process(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
