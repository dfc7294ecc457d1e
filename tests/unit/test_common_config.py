"""parse_config: flags, environment, types, and one clear line for each mistake."""

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from common.address import Address
from common.batch_sizes import BatchSizes
from common.config import describe, option, parse_config, parse_duration, required
from common.environment import warn_of_strangers
from common.version import VERSION

KUBERNETES = {
    "PDSERVE_ROUTER_SERVICE_HOST": "10.0.0.11",
    "PDSERVE_ROUTER_SERVICE_PORT": "50051",
    "PDSERVE_ROUTER_SERVICE_PORT_GRPC": "50051",
    "PDSERVE_ROUTER_PORT": "tcp://10.0.0.11:50051",
    "PDSERVE_ROUTER_PORT_50051_TCP": "tcp://10.0.0.11:50051",
    "PDSERVE_ROUTER_PORT_50051_TCP_PROTO": "tcp",
    "PDSERVE_ROUTER_PORT_50051_TCP_PORT": "50051",
    "PDSERVE_ROUTER_PORT_50051_TCP_ADDR": "10.0.0.11",
}
"""What every container gets while there is a service named pdserve-router."""


@dataclass(frozen=True)
class Config:
    model: Path = required("folder of the model")
    listen: Address = option(Address("127.0.0.1", 0), "where to listen")
    router: tuple[Address, ...] = option((), "a router to register with")
    pool_pages: int | None = option(None, "pages; about 50% of memory if absent")
    rate: float = option(0.5, "a rate")
    verify: bool = option(False, "compare checksums")
    grace: timedelta = option(timedelta(seconds=30), "time to finish in")
    transport: str = option("auto", "how to send", choices=("auto", "shm", "grpc"))
    dtype: Literal["float32", "bfloat16"] = option("float32", "what to compute in")

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError(f"--rate must be at most 1, got {self.rate}")


def parse(*argv: str, env: dict[str, str] | None = None) -> Config:
    return parse_config(Config, prog="test", description="A test.", argv=argv, env=env or {})


def test_defaults_hold_where_nothing_is_given() -> None:
    assert parse("--model", "m") == Config(model=Path("m"))


def test_every_type_is_read_from_flags() -> None:
    config = parse(
        "--model=/m", "--listen=[::1]:5", "--router=a:1", "--router", "b:2", "--pool-pages=7", "--rate=0.25", "--verify",
        "--grace=200ms", "--transport=shm", "--dtype=bfloat16",
    )  # fmt: skip
    routers = (Address("a", 1), Address("b", 2))
    grace = timedelta(milliseconds=200)
    assert config == Config(Path("/m"), Address("::1", 5), routers, 7, 0.25, True, grace, "shm", "bfloat16")


def test_every_type_is_read_from_the_environment() -> None:
    names = {"MODEL": "/m", "LISTEN": "[::1]:5", "ROUTER": "a:1, b:2", "POOL_PAGES": "7", "RATE": "0.25", "VERIFY": "true"}
    more = {"GRACE": "2m", "TRANSPORT": "grpc", "DTYPE": "float32"}
    config = parse(env={f"PDSERVE_{name}": value for name, value in (names | more).items()})
    routers = (Address("a", 1), Address("b", 2))
    assert config == Config(Path("/m"), Address("::1", 5), routers, 7, 0.25, True, timedelta(minutes=2), "grpc", "float32")


def test_a_flag_wins_over_the_environment() -> None:
    env = {"PDSERVE_MODEL": "env", "PDSERVE_VERIFY": "1", "PDSERVE_ROUTER": "a:1"}
    config = parse("--model=flag", "--no-verify", "--router=b:2", env=env)
    assert (config.model, config.verify, config.router) == (Path("flag"), False, (Address("b", 2),))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model is required (or PDSERVE_MODEL in the environment)"),
        (["--model=m", "--listen=::1:50051"], "argument --listen: must be host:port, [ipv6]:port or unix:/path, got '::1:50051'"),
        (["--model=m", "--pool-pages=x"], "argument --pool-pages: must be a whole number, got 'x'"),
        (["--model=m", "--pool-pages=-9999999999"], "argument --pool-pages: must be at least -2147483647, got '-9999999999'"),
        (["--model=m", f"--pool-pages={'9' * 400}"], f"argument --pool-pages: must be at most 2147483647, got '{'9' * 400}'"),
        (["--model=m", "--rate=inf"], "argument --rate: must be a number, got 'inf'"),
        (["--model=m", "--rate=2"], "--rate must be at most 1, got 2.0"),
        (["--model=m", "--grace=soon"], "argument --grace: must be a duration like 5s, 200ms or 2m, got 'soon'"),
        (["--model=m", "--transport=udp"], "argument --transport: must be one of auto, shm, grpc, got 'udp'"),
        (["--model=m", "--dtype=int8"], "argument --dtype: must be one of float32, bfloat16, got 'int8'"),
        (["--model=m", f"--pool-pages={1 << 31}"], "argument --pool-pages: must be at most 2147483647, got '2147483648'"),
        (["--model=m", "--grace=577h"], "argument --grace: must be at most 576h, got '577h'"),
        (["--model=m", f"--grace={'9' * 310}h"], f"argument --grace: must be at most 576h, got '{'9' * 310}h'"),
        (["--model=~no-such-user/m"], "argument --model: must be a path, and nobody here has the home directory it begins with, "
         "got '~no-such-user/m'"),
        (["--mod=m"], "unrecognized arguments: --mod=m"),
        (["--model=m", "--colour"], "unrecognized arguments: --colour"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*argv)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"test: error: {message} (see --help)\n"


def test_a_mistake_in_the_environment_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--model=m", env={"PDSERVE_VERIFY": "maybe"})
    assert "environment variable PDSERVE_VERIFY: must be true or false, got 'maybe'" in capsys.readouterr().err


def test_a_variable_that_is_none_of_the_program_s_is_named_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_strangers(Config, {"PDSERVE_MODEL": "m", "PDSERVE_POOLPAGES": "8", "PDSERVE_XYZ": "1", "HOME": "/"})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("no effect: PDSERVE_POOLPAGES (the nearest is PDSERVE_POOL_PAGES), PDSERVE_XYZ")
    caplog.clear()
    warn_of_strangers(Config, {"PDSERVE_MODEL": "m"} | KUBERNETES)
    assert not caplog.records
    warn_of_strangers(Config, {"PDSERVE_METRIC_PORT": "9090"})
    assert len(caplog.records) == 1, "by its value no address of a service"


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--version")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"pdserve {VERSION}\n")


def test_help_shows_each_flag_with_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "--model MODEL folder of the model (required; PDSERVE_MODEL)" in shown
    assert "--grace GRACE time to finish in (default: 30s; PDSERVE_GRACE)" in shown
    assert "about 50% of memory" in shown
    assert "--transport {auto,shm,grpc}" in shown


def test_describe_is_one_line_that_could_be_given_again() -> None:
    text = describe(parse("--model=m", "--router=a:1", "--router=b:2", "--grace=1500ms"))
    assert text == (
        "model=m listen=127.0.0.1:0 router=a:1,b:2 pool_pages=none rate=0.5 verify=false grace=1.5s transport=auto dtype=float32"
    )


def test_batch_sizes_are_one_flag_with_commas() -> None:
    @dataclass(frozen=True)
    class Sizes:
        graph_sizes: BatchSizes = option(BatchSizes(), "sizes")

    def given(*argv: str, env: dict[str, str] | None = None) -> BatchSizes:
        return parse_config(Sizes, prog="test", description="", argv=argv, env=env or {}).graph_sizes

    assert given("--graph-sizes=8, 2,1,2") == (1, 2, 8)
    assert given("--graph-sizes=none") == given("--graph-sizes=") == ()
    assert given(env={"PDSERVE_GRAPH_SIZES": "4,1"}) == (1, 4)
    assert describe(Sizes(BatchSizes([2, 1]))) == "graph_sizes=1,2"


@pytest.mark.parametrize("text", ["1,,2", "0", "-1", "1;2", "x"])
def test_what_is_no_batch_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be "):
        BatchSizes.parse(text)


def test_the_default_batch_sizes_end_at_the_largest_batch() -> None:
    assert BatchSizes.up_to(1) == (1,)
    assert BatchSizes.up_to(20) == (1, 2, 4, 8, 16, 20)
    assert BatchSizes.up_to(256)[:6] == (1, 2, 4, 8, 16, 24) and BatchSizes.up_to(256)[-1] == 256
    assert BatchSizes.up_to(320)[-3:] == (256, 288, 320)


def test_a_type_nobody_can_read_is_a_mistake_in_the_program() -> None:
    @dataclass(frozen=True)
    class Odd:
        value: complex = option(0j, "odd")

    with pytest.raises(KeyError):
        parse_config(Odd, prog="test", description="", argv=[], env={})


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("200ms", 0.2), ("2m", 120), ("1h", 3600), ("7", 7), ("0.5", 0.5), ("0", 0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "-1s", "1 s", "s", "1d", "nan", "1e3", "٣s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(text)


def test_the_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse("--model=m").rate = 0.1  # type: ignore[misc]
