"""What bench/serve.py takes on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.serving.clients import default_clients
from bench.serving.figures import Slo
from bench.serving.lengths import Lengths
from bench.serving.systems import Deployment, System, local_model

OUT = Path(__file__).resolve().parents[1] / "out"
T = TypeVar("T")


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    common = _common()
    made = {name: modes.add_parser(name, parents=[common]) for name in ("open", "goodput", "offline", "interference")}
    for name, mode in made.items():
        _lengths(mode, output="4096" if name == "interference" else "256")
        _window(mode)
    made["open"].add_argument("--rate", type=positive, action="append", help="requests per second; repeatable (default: 1)")
    made["open"].add_argument("--trace", type=Path, help='instead: JSON lines {"at": s, "input": tokens, "output": tokens}')
    _goodput(made["goodput"])
    made["offline"].add_argument("--requests", type=int, default=256)
    _interference(made["interference"])
    args = parser.parse_args(argv)
    if bool(args.router) == args.launch:
        parser.error("give --router ADDRESS or --launch")
    if args.router and args.compare:
        parser.error("--compare needs --launch")
    if args.mode == "goodput":
        args.slo = args.slo or [Slo.parse("ttft:p90:400ms"), Slo.parse("gap:p99:12ms")]
    return args


def systems(args: argparse.Namespace) -> list[System]:
    """What to measure, in this order."""
    if args.router:
        return [System("running", router=args.router)]
    model, more = local_model(args.model, args.out / "models")
    given = [word for option in ("max_context", "dtype") if (word := getattr(args, option)) is not None]
    flags = [f"--{option.replace('_', '-')}" for option in ("max_context", "dtype") if getattr(args, option) is not None]
    options = tuple(str(word) for pair in zip(flags, given, strict=True) for word in pair)
    deployment = Deployment(
        model=model,
        device=args.device,
        prefill=args.prefill,
        decode=args.decode,
        both_args=args.worker_args,
        prefill_args=args.prefill_args,
        decode_args=args.decode_args,
        colocated_args=args.colocated_args,
        options=(*options, *more),
    )
    if args.prefill == 0:
        return [deployment.colocated()]
    return [deployment.split(), *([deployment.colocated()] if args.compare else [])]


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    system = common.add_argument_group("what is measured")
    add = system.add_argument
    add("--router", default="", metavar="ADDRESS", help="of a running cluster")
    add("--launch", action="store_true", help="a local cluster (deploy.run_local), stopped at the end")
    add("--compare", choices=("colocated",), help="the same load on as many workers that each have both roles")
    add("--model", default="", help="as of make run-local, or Llama-3-8B or Qwen3-0.6B with random weights")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--prefill", type=int, default=1, help="prefill workers; 0: the others have both roles")
    add("--decode", type=int, default=1)
    add("--max-context", type=int)
    add("--dtype")
    add("--worker-args", default="", help="more options of every worker, as one text")
    add("--prefill-args", default="", help="of prefill workers")
    add("--decode-args", default="", help="of decode workers, also of those with both roles")
    add("--colocated-args", default="", help="of workers with both roles")
    client = common.add_argument_group("the client")
    add = client.add_argument
    add("--clients", type=int, default=default_clients(), help="processes that send (default: a quarter of the cores)")
    add("--seed", type=int, default=0)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--timeout", type=positive, default=600.0, help="a request's, in seconds")
    add("--out", type=Path, default=OUT, help="folder of JSON, plots and logs")
    return common


def _lengths(mode: argparse.ArgumentParser, *, output: str) -> None:
    text = "2048, 100-1024 (uniform) or lognormal:MEDIAN,SIGMA[,MOST]"
    mode.add_argument("--input", type=argument(Lengths.parse), default="1024", help=f"prompt tokens: {text}")
    mode.add_argument("--output", type=argument(Lengths.parse), default=output, help="tokens asked for, likewise")


def _window(mode: argparse.ArgumentParser) -> None:
    mode.add_argument("--warmup", type=positive, default=5.0, help="seconds of load before what is measured")
    mode.add_argument("--seconds", type=positive, default=30.0, help="of arrivals that are measured")
    mode.add_argument("--tail", type=positive, default=10.0, help="seconds that arrivals go on after, at most")
    mode.add_argument("--drain", type=positive, default=30.0, help="seconds to answer in after the last arrival, else failed")


def _goodput(mode: argparse.ArgumentParser) -> None:
    add = mode.add_argument
    add("--slo", type=argument(Slo.parse), action="append", help="METRIC:pN:LIMIT; repeatable (ttft:p90:400ms gap:p99:12ms)")
    add("--sweep", type=argument(Slo.parse), action="append", default=[], help="an objective to put in the place of its like")
    add("--lowest", type=positive, default=0.5, help="request rate to start from")
    add("--highest", type=positive, default=64.0, help="request rate never exceeded")
    add("--ratio", type=float, default=1.08, help="of one rate to the next: how close the answer is")


def _interference(mode: argparse.ArgumentParser) -> None:
    add = mode.add_argument
    add("--streams", type=int, default=64, help="that run all the while; --input and --output are theirs")
    add("--prompt", type=argument(Lengths.parse), default="4096", help="tokens of the prompts that arrive")
    add("--prompt-output", type=argument(Lengths.parse), default="2", help="tokens that each of them asks for")
    add("--rate", type=positive, help="prompts per second")
    add("--share", type=positive, default=0.8, help="of what the system takes of prompts alone, if --rate is not given")


def positive(text: str) -> float:
    if (value := float(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def argument(parse: Callable[[str], T]) -> Callable[[str], Any]:
    """argparse drops a ValueError's own words and keeps those of an ArgumentTypeError."""

    def wrapped(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return wrapped
