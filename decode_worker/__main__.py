"""python -m decode_worker: takes over prompts whose KV a prefill worker has computed, and streams the tokens to the router."""

from __future__ import annotations

if __name__ == "__main__":
    from common import early_end

    early_end.begin()

from common.config import parse_config
from common.engine.threads import limit_spinning
from common.environment import warn_of_strangers
from common.logs import configure
from common.rpc.process import run_process
from decode_worker.config import Config


def main() -> None:
    config = parse_config(Config, prog="python -m decode_worker", description=__doc__ or "")
    configure("decode", config.log_level, config.log_format)
    warn_of_strangers(Config)
    limit_spinning()
    # Only now: importing it takes time, and --help and a wrong flag need none of it.
    from decode_worker.server import serve

    run_process(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
