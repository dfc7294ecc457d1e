"""A model folder's identity, cheap enough to compute at every start.

Covers config, tokenizer files and weights. Small weight files are hashed whole; of larger ones the header (names, shapes, places)
and three blocks of each tensor, so that a changed tensor shows although most bytes are not read.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from common.errors import StartError
from common.model_dir import ModelDir

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
WHOLE_BYTES = 32 << 20
BLOCK_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def fingerprint(model: ModelDir) -> str:
    """16 hex digits; equal on every machine that has equal files. Raises StartError on a weight file that is cut or broken."""
    digest = sha256()
    _add(digest, "config.json", json.dumps(model.config, sort_keys=True).encode())
    try:
        for path in (model.path / name for name in TEXT_FILES):
            if path.exists():
                _add(digest, path.name, path.read_bytes())
        for path in model.weight_files:
            _add(digest, path.name, _weights_digest(path))
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from None
    return digest.hexdigest()[:16]


def _add(digest: Any, name: str, data: bytes) -> None:
    """Name and length first, so that no two lists of files look the same."""
    digest.update(f"{name}\0{len(data)}\0".encode())
    digest.update(data)


def _weights_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        start, header, places = _read_header(file, path)
        digest = sha256(header)
        for offset, length in _blocks(places):
            file.seek(start + offset)
            digest.update(file.read(length))
    return digest.digest()


def _read_header(file: IO[bytes], path: Path) -> tuple[int, bytes, list[tuple[int, int]]]:
    """Where the data starts, the header's bytes, and where each tensor begins and ends from there, in order.

    A safetensors file: 8 bytes header length, little-endian; a JSON header; the tensors' bytes.
    """
    size = path.stat().st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise StartError(f"{path} is not a safetensors file")
    header = file.read(length)
    try:
        entries = json.loads(header)
        places = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
        if not all(0 <= begin <= end for begin, end in places):
            raise ValueError("offsets out of order")
        needed = 8 + length + max((end for _, end in places), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise StartError(f"{path} is not a safetensors file") from None
    if size != needed:
        raise StartError(f"{path} is cut or damaged: it has {size} bytes, its header says {needed}")
    return 8 + length, header, places


def _blocks(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) of what is hashed."""
    data_bytes = max((end for _, end in places), default=0)
    if data_bytes <= WHOLE_BYTES:
        return [(0, data_bytes)]
    return [block for begin, end in places for block in _blocks_of(begin, end)]


def _blocks_of(begin: int, end: int) -> list[tuple[int, int]]:
    """Start, middle and end of a tensor, without doubles for a small one."""
    last = max(begin, end - BLOCK_BYTES)
    return [(offset, min(BLOCK_BYTES, end - offset)) for offset in sorted({begin, (begin + last) // 2, last})]
