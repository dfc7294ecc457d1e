"""Reading a model folder's JSON files, every fault as one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import StartError


def read_text(path: Path) -> str:
    """The file's UTF-8 text. Raises StartError when it is missing, unreadable or no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StartError(f"model folder {path.parent} has no {path.name}") from None
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StartError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object. Raises StartError when it is missing, unreadable, broken or no object."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise StartError(f"{path} is not valid JSON: {error.msg} at line {error.lineno}") from None
    except RecursionError:
        raise StartError(f"{path} is not usable JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise StartError(f"{path} must hold a JSON object, has a {type(value).__name__}")
    return value


def read_object_if_there(path: Path) -> dict[str, Any]:
    """As read_object; a file that does not exist is an empty object."""
    return read_object(path) if path.exists() else {}
