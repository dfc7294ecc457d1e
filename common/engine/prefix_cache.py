"""PrefixCache: a radix tree over whole pages of token ids. Which pages hold which prefix, who uses them, which may go first.

    ids   | page 0 | page 1 | page 2 | rest |      an edge is one page's ids, so a hit is the same tokens, never the same hash
    tree  root ----- node ---- node               a node owns one page of the pool
                         '---- node               siblings differ in at least one token of the page

A node is locked while a request uses it (or a node below it); unlocked leaves are evicted, least recently used first.
The tree knows page ids only; who else owns a page is common/engine/pages.py's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.wire import ids_to_bytes


@dataclass(eq=False)
class _Node:
    page: int
    edge: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.locks == 0 and not self.children and self.parent is not None


@dataclass(frozen=True)
class PrefixHandle:
    """A locked path from the root. pages[i] holds ids [i * page_size, (i + 1) * page_size); length is in tokens."""

    pages: list[int]
    length: int
    _node: _Node = field(repr=False)


class PrefixCache:
    """Not thread-safe: the engine thread owns it. Every PrefixHandle it returns is locked and must be unlocked exactly once."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._root = _Node(page=-1, edge=b"", parent=None)
        self._clock = 0
        self._evictable: list[tuple[int, int, _Node]] = []
        """Heap of (last_used, push number, node); entries that no longer hold are skipped when popped."""
        self._pushes = 0
        self.num_nodes = 0
        self.num_locked = 0

    @property
    def num_unlocked(self) -> int:
        return self.num_nodes - self.num_locked

    def match(self, ids: Sequence[int], *, max_len: int) -> PrefixHandle:
        """Locks and returns the longest cached prefix of ids in whole pages, at most max_len tokens."""
        node, pages = self._root, list[int]()
        for edge in self._edges(ids, min(max_len, len(ids)) // self._page_size):
            child = node.children.get(edge)
            if child is None:
                break
            node = child
            pages.append(node.page)
        return self._lock(node, pages)

    def insert(self, ids: Sequence[int], pages: Sequence[int]) -> tuple[PrefixHandle, list[int]]:
        """Makes the first len(pages) whole pages of ids cached. Returns a locked handle over them and those of `pages` that the
        tree did not take, because it already had an equal page (the handle names the tree's own)."""
        node, path, duplicates = self._root, list[int](), list[int]()
        for page, edge in zip(pages, self._edges(ids, len(pages)), strict=True):
            child = node.children.get(edge)
            if child is None:
                child = node.children[edge] = _Node(page, edge, parent=node)
                self.num_nodes += 1
            elif child.page != page:
                duplicates.append(page)
            node = child
            path.append(node.page)
        return self._lock(node, path), duplicates

    def unlock(self, handle: PrefixHandle) -> None:
        """Ends a handle's use. Its pages stay cached until evicted."""
        self._clock += 1
        node: _Node | None = handle._node
        while node is not None and node.parent is not None:
            assert node.locks > 0, "a prefix handle was unlocked twice"
            node.locks -= 1
            node.last_used = self._clock
            if node.locks == 0:
                self.num_locked -= 1
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> list[int]:
        """Drops up to count unlocked pages, least recently used leaves first; returns the pages."""
        evicted: list[int] = []
        while len(evicted) < count and self._evictable:
            last_used, _, node = heapq.heappop(self._evictable)
            if not node.is_evictable or node.last_used != last_used:
                continue
            parent, node.parent = node.parent, None
            assert parent is not None
            del parent.children[node.edge]
            self.num_nodes -= 1
            evicted.append(node.page)
            self._offer(parent)
        return evicted

    def pages(self) -> set[int]:
        """Every page in the tree, for checks."""
        found, stack = set[int](), list(self._root.children.values())
        while stack:
            node = stack.pop()
            found.add(node.page)
            stack.extend(node.children.values())
        return found

    def _lock(self, node: _Node, pages: list[int]) -> PrefixHandle:
        handle = PrefixHandle(pages, len(pages) * self._page_size, node)
        self._clock += 1
        walk: _Node | None = node
        while walk is not None and walk.parent is not None:
            if walk.locks == 0:
                self.num_locked += 1
            walk.locks += 1
            walk.last_used = self._clock
            walk = walk.parent
        return handle

    def _offer(self, node: _Node) -> None:
        if node.is_evictable:
            self._pushes += 1
            heapq.heappush(self._evictable, (node.last_used, self._pushes, node))
            if len(self._evictable) > 2 * self.num_nodes + 64:
                self._drop_stale()

    def _drop_stale(self) -> None:
        """Without evictions, every use of a leaf leaves a stale entry behind: keep the heap within a constant of the tree."""
        self._evictable = [entry for entry in self._evictable if entry[2].is_evictable and entry[2].last_used == entry[0]]
        heapq.heapify(self._evictable)

    def _edges(self, ids: Sequence[int], count: int) -> list[bytes]:
        width = self._page_size * 4
        packed = ids_to_bytes(ids[: count * self._page_size])
        return [packed[i * width : (i + 1) * width] for i in range(count)]
