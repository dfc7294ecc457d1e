"""A whole cluster on this machine: router, prefill workers and decode workers, until Ctrl-C (make run-local).

Start: resolve the model -> check the folder -> start every process -> wait until the router would take a request -> say so.
End:   Ctrl-C, or one process ends -> each gets exactly one SIGINT -> all have ended -> exit. A second Ctrl-C kills.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common import early_end

    early_end.begin()

import argparse
import asyncio
import os
import shlex
import signal
import socket
from collections.abc import Sequence

from common.address import Address
from common.errors import StartError
from common.log_output import hold_standard_streams
from common.model_dir import ModelDir
from common.rpc.process import end_now
from common.rpc.server import check_free
from deploy.cluster import Cluster
from deploy.cluster_plan import Command, Options, place, plan
from deploy.fetch_model import resolve
from deploy.gpus import count_gpus
from deploy.progress import say


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="", help="folder, or owner/name of the hub; default: SmolLM2-135M-Instruct, fetched once"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda; auto: GPUs if there are any (default: auto)")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers; 0: none (default: 1)")
    parser.add_argument("--decode", type=int, default=1, help="decode workers (default: 1)")
    parser.add_argument("--port", type=int, default=50051, help="the router's, on 127.0.0.1; 0 takes a free one (default: 50051)")
    parser.add_argument("--max-context", type=int, help="caps the context, in tokens")
    parser.add_argument("--dtype", help="what the workers compute in (default: theirs)")
    parser.add_argument("--load-format", help="dummy: random weights, for benchmarks (default: the workers')")
    parser.add_argument("--prefill-args", type=_words, default=(), help="more options of the prefill workers, as one text")
    parser.add_argument("--decode-args", type=_words, default=(), help="more options of the decode workers, as one text")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error (default: info)")
    arguments = parser.parse_args()
    hold_standard_streams()
    try:
        if not 0 <= arguments.port <= 65535:
            raise ValueError(f"PORT must be in [0, 65535], got {arguments.port}")
        router = Address("127.0.0.1", arguments.port or _free_port())
        return asyncio.run(_run(_commands(arguments, router), router))
    except (StartError, ValueError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be options as a shell takes them, got {text!r}: {str(error).lower()}") from None


def _commands(arguments: argparse.Namespace, router: Address) -> list[Command]:
    if arguments.prefill < 0 or arguments.decode < 1:
        raise ValueError(f"PREFILL must be at least 0 and DECODE at least 1, got {arguments.prefill} and {arguments.decode}")
    gpus = 0 if arguments.device == "cpu" else count_gpus()
    devices = place(arguments.device, gpus=gpus, prefill=arguments.prefill, decode=arguments.decode)
    model = ModelDir.open(resolve(arguments.model), need_weights=arguments.load_format != "dummy")
    options = Options(
        model=model.path,
        router=router,
        prefill=arguments.prefill,
        decode=arguments.decode,
        max_context=arguments.max_context,
        dtype=arguments.dtype,
        load_format=arguments.load_format,
        log_level=arguments.log_level,
        prefill_args=tuple(arguments.prefill_args),
        decode_args=tuple(arguments.decode_args),
    )
    say(f"model {model.path}, workers on {', '.join(dict.fromkeys(devices))}")
    return plan(options, devices=devices, cores=len(os.sched_getaffinity(0)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _run(commands: Sequence[Command], router: Address) -> int:
    await check_free(router)  # Before anything is started; the router itself would say the same a little later.
    cluster = Cluster(commands)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, cluster.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Held back if this was itself started by deploy.tied.
    return await cluster.run()


if __name__ == "__main__":
    early_end.over()
    end_now(main())
