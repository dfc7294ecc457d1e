"""PromptBlocks: a prompt as the names of its leading blocks, each a hash of all up to its end: equal names, equal prefixes.

    ids     | block 0 | block 1 | block 2 | rest |
    names   h0        h1        h2                    h1 = hash(h0 + ids of block 1)

The same in every router and on every machine. 8 bytes: a collision costs a cache miss, never a wrong answer.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from common.wire import ids_to_bytes

BLOCK_TOKENS = 64


def block_tokens(page_size: int) -> int:
    """Tokens per block: whole pages, for workers cache whole pages, and few of them, for hashing has its price too."""
    return page_size * max(1, BLOCK_TOKENS // page_size)


class PromptBlocks:
    """Hashes when first asked. len() is in tokens."""

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids
        self._names: dict[int, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def names(self, *, tokens: int) -> list[bytes]:
        """Of the whole blocks of so many tokens that a cache may give: the last token is always computed."""
        if tokens not in self._names:
            self._names[tokens] = _names(self._ids, tokens)
        return self._names[tokens]


def _names(ids: array[int], tokens: int) -> list[bytes]:
    data, width = ids_to_bytes(ids), 4 * tokens
    names: list[bytes] = []
    name = b""
    for end in range(width, 4 * (len(ids) - 1) + 1, width):
        name = blake2b(data[end - width : end], key=name, digest_size=8).digest()
        names.append(name)
    return names


NO_PROMPT = PromptBlocks(array("i"))
