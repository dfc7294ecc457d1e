"""Log lines: one format, the request's name at the end."""

import logging
import re
from collections.abc import Iterator

import pytest

from common import logs


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_says_when_how_bad_who_what_and_for_which_request(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info")
    logging.getLogger("router.pipeline").info("placed on %s", "p1", extra={"request_id": "req-8"})
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO  router  placed on p1 \[req-8\]\n", capsys.readouterr().err)


def test_a_request_id_cannot_break_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info")
    logging.getLogger("x").info("done", extra={"request_id": "a\nERROR forged"})
    assert capsys.readouterr().err.count("\n") == 1


def test_lines_below_the_level_are_left_out_and_a_traceback_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("decode", "warning")
    logging.getLogger("x").info("quiet")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("it broke")
    shown = capsys.readouterr().err
    assert "quiet" not in shown
    assert "ERROR decode  it broke\nTraceback" in shown
    assert shown.endswith("RuntimeError: boom\n")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="--log-level must be one of debug, info, warning, error, got 'loud'"):
        logs.configure("router", "loud")
