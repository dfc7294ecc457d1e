"""Log lines on stderr: when, how bad, which process, what, and for which request. Never a prompt's or an answer's text.

text   12:03:04.567 INFO  router  attempt 1 failed: decode worker ... is gone [req-8 uid 1764550000000 attempt 1]
json   {"time": "2026-01-31T12:03:04.567Z", "level": "info", "process": "router", "logger": "router.attempts",
        "message": "attempt 1 failed: ...", "request_id": "req-8", "uid": 1764550000000, "attempt": 1}

A line says what it is about with extra=about(...), or by what its call has bound (bind). A JSON line has the fields above, and
"exception" with a traceback; those of the last three that are not known are left out.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, get_args

from common.log_output import StderrHandler, hold_standard_streams

LEVELS: Final = ("debug", "info", "warning", "error")
MAX_NAME_CHARS: Final = 256
"""A client's name for its request is shown up to here: whoever chose a longer one is refused, which is logged too."""
_LINE_ENDS: Final = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""What some readers take for the end of a line, and JSON leaves as it is."""
LogFormat = Literal["text", "json"]
FORMATS: Final[tuple[LogFormat, ...]] = get_args(LogFormat)


class Settings(NamedTuple):
    """What configure() was told."""

    process: str
    level: str
    format: LogFormat


@dataclass
class About:
    """The request that a line is about, as far as it is known: its name, a completion of it, an attempt at that."""

    request_id: str = ""
    uid: int | None = None
    attempt: int | None = None


_configured: Settings | None = None
_bound: ContextVar[About | None] = ContextVar("about", default=None)


def configure(process: str, level: str, format: LogFormat = "text") -> None:
    """Sends this process's logging to stderr. process names it in each line; level is one of LEVELS. Raises ValueError."""
    if level not in LEVELS:
        raise ValueError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    if format not in FORMATS:
        raise ValueError(f"--log-format must be one of {', '.join(FORMATS)}, got {format!r}")
    global _configured
    _configured = Settings(process, level, format)
    hold_standard_streams()
    handler = StderrHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if format == "json" else _TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Each would log every call or retry of its own at our level.
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_ours)
    _log_what_nobody_catches()


def settings_of(part: str) -> Settings | None:
    """What a process that is a part of this one configures its logging with; None if this one's is not configured."""
    return None if _configured is None else _configured._replace(process=f"{_configured.process} {part}")


def about(request_id: str = "", *, uid: int | None = None, attempt: int | None = None) -> dict[str, Any]:
    """For a logging call's extra."""
    return {"about": About(request_id, uid, attempt)}


def bind(what: About) -> None:
    """Lines of this task from now on are about it, unless they say otherwise; so are those of tasks begun from here, so it is for
    the task of one call. What it knows may be added to later."""
    _bound.set(what)


def _is_ours(record: logging.LogRecord) -> bool:
    """grpc logs metadata that is not UTF-8 with a traceback, and with its bytes: what a caller meant as a token, maybe."""
    return not str(record.msg).startswith("Invalid encoding on")


def _log_what_nobody_catches() -> None:
    """As any other line, instead of plain text on stderr: exceptions and warnings."""
    log = logging.getLogger(__name__)
    logging.captureWarnings(True)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            log.critical("uncaught exception", exc_info=(kind, error, trace))

    def uncaught_in_thread(what: threading.ExceptHookArgs) -> None:
        if what.exc_value is not None:
            log.error("uncaught exception in thread %s", what.thread and what.thread.name, exc_info=what.exc_value)

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        if what.exc_value is not None:
            log.error("%s: %r", what.err_msg or "exception ignored in", what.object, exc_info=what.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = uncaught, uncaught_in_thread, unraisable


def _about(record: logging.LogRecord) -> About:
    said: About | None = getattr(record, "about", None) or _bound.get()
    if said is None:
        return About()
    return said if len(said.request_id) <= MAX_NAME_CHARS else replace(said, request_id=said.request_id[:MAX_NAME_CHARS] + "...")


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        line = f"{at} {record.levelname:<5} {self._process}  {record.getMessage()}{_tail(_about(record))}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _tail(what: About) -> str:
    # A client's name for its request: shown so that it cannot break the line.
    name = what.request_id if what.request_id.isprintable() else repr(what.request_id)
    parts = [
        name,
        "" if what.uid is None else f"uid {what.uid}",
        "" if what.attempt is None else f"attempt {what.attempt}",
    ]
    return f" [{' '.join(filter(None, parts))}]" if any(parts) else ""


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        what = _about(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": what.request_id or None,
            "uid": what.uid,
            "attempt": what.attempt,
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        line = json.dumps({name: value for name, value in fields.items() if value is not None}, ensure_ascii=False)
        return line.translate(_LINE_ENDS)
