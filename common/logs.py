"""Log lines on stderr: when, how bad, which process, what, and for which request. Never a prompt's or an answer's text.

12:03:04.567 INFO  router  placed on prefill-3f2a91c0 and decode-77b01e5d [req-8]
"""

from __future__ import annotations

import logging
import sys
from datetime import datetime

LEVELS = ("debug", "info", "warning", "error")
_configured: tuple[str, str] | None = None


def configure(process: str, level: str) -> None:
    """Sends this process's logging to stderr. process names it in each line; level is one of LEVELS. Raises ValueError."""
    if level not in LEVELS:
        raise ValueError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    global _configured
    _configured = process, level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Each would log every call or retry of its own at our level.
    for chatty in ("asyncio", "httpx", "httpcore", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def name_and_level(part: str) -> tuple[str, str] | None:
    """What a process that is a part of this one configures its logging with; None if this one's is not configured."""
    return _configured and (f"{_configured[0]} {part}", _configured[1])


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        line = f"{at} {record.levelname:<5} {self._process}  {record.getMessage()}"
        if request_id := getattr(record, "request_id", ""):
            # A client's name for its request: shown so that it cannot break the line.
            line += f" [{request_id!r}]" if not str(request_id).isprintable() else f" [{request_id}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line
