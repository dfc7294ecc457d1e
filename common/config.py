"""A process's configuration: one frozen dataclass, filled from flags and the environment.

    @dataclass(frozen=True)
    class Config:
        model: Path = required("folder of the model")
        grace: timedelta = option(timedelta(seconds=30), "time to finish running requests in")

    config = parse_config(Config, prog="python -m decode_worker", description=__doc__)

Each field is a flag (--grace 30s) and an environment variable (PDSERVE_GRACE=30s); the flag wins. The field's type says how its
text is read: str, int, float, bool (--x / --no-x), Path, timedelta, Address, BatchSizes, tuple[T, ...] (a repeatable flag;
comma-separated in the environment), and X | None. A text that cannot be read, or a ValueError from __post_init__, ends the
process with one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from common.address import Address
from common.batch_sizes import BatchSizes
from common.version import VERSION

ENV_PREFIX = "PDSERVE_"
_ABSENT: Any = object()
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "h": 3600.0}
LARGEST: Final = (1 << 31) - 1
"""Of whole numbers: what every field of a message and every setting of gRPC's can hold."""
LONGEST: Final = timedelta(days=24)
"""The same of durations: gRPC counts milliseconds."""
T = TypeVar("T")


def option(default: Any, help: str, *, choices: Sequence[Any] | None = None, group: str = "") -> Any:
    """A field that may be left out. group: the heading that --help shows it under, after those without."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "group": group})


def required(help: str) -> Any:
    """A field that must be given."""
    return dataclasses.field(metadata={"help": help, "choices": None})


def parse_config(
    cls: type[T], *, prog: str, description: str, argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> T:
    """An instance of the dataclass cls from argv and env (default: the process's own)."""
    env = os.environ if env is None else env
    entries = _entries(cls)
    parser = _OneLineParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"pdserve {VERSION}")
    groups = {"": parser} | {
        group: parser.add_argument_group(group) for group in dict.fromkeys(e.group for e in entries) if group
    }
    for entry in entries:
        entry.add_to(groups[entry.group])
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for entry in entries:
        if (value := given[entry.name]) is not _ABSENT:
            values[entry.name] = tuple(value) if entry.repeatable else value
        elif entry.variable in env:
            try:
                values[entry.name] = entry.from_env(env[entry.variable])
            except ValueError as error:
                parser.error(f"environment variable {entry.variable}: {error}")
        elif entry.default is dataclasses.MISSING:
            parser.error(f"{entry.flag} is required (or {entry.variable} in the environment)")
    try:
        return cls(**values)
    except ValueError as error:
        parser.error(str(error))


def variables(cls: type) -> list[str]:
    """The environment's names for its fields."""
    return [entry.variable for entry in _entries(cls)]


def describe(config: Any) -> str:
    """One line, name=value for each field, for printing at start."""
    return " ".join(f"{field.name}={show(getattr(config, field.name))}" for field in _fields(type(config)))


def _fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Those without a group first, whichever class of cls's line has them."""
    return sorted(dataclasses.fields(cls), key=lambda field: bool(field.metadata.get("group")))


def show(value: Any) -> str:
    """The text that would give this value; 'none' for None."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"
    if isinstance(value, tuple) and not isinstance(value, Address | BatchSizes):
        return ",".join(map(show, value)) or "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def parse_duration(text: str) -> timedelta:
    """'5s', '200ms', '2m', '1h' or a plain number of seconds. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|)", text)
    if match is None:
        raise ValueError(f"must be a duration like 5s, 200ms or 2m, got {text!r}")
    if (seconds := float(match[1]) * _SECONDS[match[2]]) > LONGEST.total_seconds():
        raise ValueError(f"must be at most {LONGEST // timedelta(hours=1)}h, got {text!r}")
    return timedelta(seconds=seconds)


def _parse_bool(text: str) -> bool:
    if (word := text.lower()) not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(f"must be true or false, got {text!r}")
    return word in ("1", "true", "yes", "on")


def _number(kind: type[int] | type[float], called: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if number != number or abs(number) == math.inf:
            raise ValueError(f"must be {called}, got {text!r}")
        if kind is int and abs(number) > LARGEST:
            raise ValueError(f"must be {f'at most {LARGEST}' if number > 0 else f'at least {-LARGEST}'}, got {text!r}")
        return number

    return parse


def _parse_path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"must be a path, and nobody here has the home directory it begins with, got {text!r}") from None


_PARSERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: _number(int, "a whole number"),
    float: _number(float, "a number"),
    bool: _parse_bool,
    Path: _parse_path,
    timedelta: parse_duration,
    Address: Address.parse,
    BatchSizes: BatchSizes.parse,
}


class _Entry(NamedTuple):
    """One field as a flag and an environment variable."""

    name: str
    parse: Callable[[str], Any]
    repeatable: bool
    is_switch: bool
    default: Any
    help: str
    choices: Sequence[Any] | None
    group: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        default = "required" if self.default is dataclasses.MISSING else f"default: {show(self.default)}"
        help = f"{self.help} ({default}; {self.variable})".replace("%", "%%")
        common: dict[str, Any] = {"dest": self.name, "default": _ABSENT, "help": help}
        if self.is_switch:
            parser.add_argument(self.flag, action=argparse.BooleanOptionalAction, **common)
            return
        metavar = "{" + ",".join(map(str, self.choices)) + "}" if self.choices else self.name.upper()
        action = _Append if self.repeatable else "store"
        parser.add_argument(self.flag, action=action, type=self._parse_flag, metavar=metavar, **common)

    def _parse_flag(self, text: str) -> Any:
        # argparse drops a ValueError's own words and keeps those of an ArgumentTypeError.
        try:
            return self._parse_one(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def from_env(self, text: str) -> Any:
        if self.repeatable:
            return tuple(self._parse_one(part.strip()) for part in text.split(",") if part.strip())
        return self._parse_one(text)

    def _parse_one(self, text: str) -> Any:
        value = self.parse(text)
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(map(str, self.choices))}, got {text!r}")
        return value


def _entries(cls: type) -> list[_Entry]:
    hints = typing.get_type_hints(cls)
    return [_entry(field, hints[field.name]) for field in _fields(cls)]


def _entry(field: dataclasses.Field[Any], hint: Any) -> _Entry:
    """Raises KeyError on a type this module cannot read: a mistake in the program, not in its use."""
    if isinstance(hint, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if repeatable := typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    choices = field.metadata["choices"]
    if typing.get_origin(hint) is typing.Literal:
        choices, hint = choices or typing.get_args(hint), type(typing.get_args(hint)[0])
    return _Entry(
        field.name,
        _PARSERS[hint],
        repeatable,
        hint is bool and not repeatable,
        field.default,
        field.metadata["help"],
        choices,
        field.metadata.get("group", ""),
    )


class _Append(argparse.Action):
    """Collects a repeatable flag, starting anew from nothing rather than from the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if before is _ABSENT else [*before, values])


class _OneLineParser(argparse.ArgumentParser):
    """Without the usage block in front of an error: one line says what is wrong."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")
