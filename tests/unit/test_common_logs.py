"""Log lines: one format, the request's name at the end."""

import asyncio
import json
import logging
import re
import sys
import threading
import warnings
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
    logging.getLogger("router.pipeline").info("placed on %s", "p1", extra=logs.about("req-8", uid=7, attempt=2))
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO  router  placed on p1 \[req-8 uid 7 attempt 2\]\n", capsys.readouterr().err)


def test_a_request_id_cannot_break_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info")
    logging.getLogger("x").info("done", extra=logs.about("a\nERROR forged"))
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("format", logs.FORMATS)
def test_a_request_id_longer_than_any_may_be_is_cut(capsys: pytest.CaptureFixture[str], format: logs.LogFormat) -> None:
    logs.configure("router", "info", format)
    logging.getLogger("x").info("refused", extra=logs.about("é" * 1_000_000, uid=7))
    shown = capsys.readouterr().err
    assert "é" * logs.MAX_NAME_CHARS + "..." in shown and len(shown) < 600


@pytest.mark.parametrize("ending", ["\n", "\r", "\x0b", "\x85", "\u2028", "\u2029", "\x1b[31m", "\x00", '"', "\\"])
def test_a_json_line_is_one_line_to_every_reader(ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info", "json")
    logging.getLogger("x").info("got %s", ending, extra=logs.about(f"a{ending}b"))
    (line,) = capsys.readouterr().err.splitlines()
    assert (json.loads(line)["request_id"], json.loads(line)["message"]) == (f"a{ending}b", f"got {ending}")


def test_what_nobody_catches_is_a_line_like_any_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.captureWarnings(False)  # Begins anew: pytest has put back what an earlier test's configure() took.
    for module, name in ((sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    logs.configure("router", "info", "json")
    error = ValueError("boom")
    sys.excepthook(ValueError, error, None)
    threading.excepthook(threading.ExceptHookArgs((ValueError, error, None, threading.current_thread())))
    warnings.warn("an old way", stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    logging.captureWarnings(False)
    assert [line["level"] for line in lines] == ["critical", "error", "warning"]
    assert "boom" in lines[0]["exception"] and "boom" in lines[1]["exception"] and "an old way" in lines[2]["message"]


def test_metadata_that_grpc_cannot_decode_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes may be what somebody meant as a token."""
    logs.configure("router", "debug")
    logging.getLogger("grpc._cython.cygrpc").exception("Invalid encoding on %s", b"Bearer \xff")
    logging.getLogger("grpc._cython.cygrpc").error("something else")
    assert "Bearer" not in (shown := capsys.readouterr().err) and "something else" in shown


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


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="--log-format must be one of text, json, got 'xml'"):
        logs.configure("router", "info", "xml")  # type: ignore[arg-type]


def test_a_json_line_is_an_object_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info", "json")
    logging.getLogger("router.attempts").warning("it\n%s", "fails", extra=logs.about("r\n1", uid=7, attempt=2))
    logging.getLogger("x").info("up")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "warning", "process": "router", "logger": "router.attempts", "message": "it\nfails",
        "request_id": "r\n1", "uid": 7, "attempt": 2,
    }  # fmt: skip
    assert set(second) == {"time", "level", "process", "logger", "message"}


def test_a_traceback_is_a_field_of_its_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info", "json")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("x").exception("it broke")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"].endswith("RuntimeError: boom")


async def test_a_task_s_lines_are_about_what_it_has_bound_and_learns_later(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("router", "info")

    async def call(name: str) -> None:
        what = logs.About(name)
        logs.bind(what)
        await asyncio.sleep(0)
        what.uid = 3
        logging.getLogger("x").info("ended")
        logging.getLogger("x").info("another's", extra=logs.about("c"))

    await asyncio.gather(call("a"), call("b"))
    logging.getLogger("x").info("nobody's")
    tails = [line.split("router  ")[1] for line in capsys.readouterr().err.splitlines()]
    assert tails == ["ended [a uid 3]", "another's [c]", "ended [b uid 3]", "another's [c]", "nobody's"]
