"""What a Reserve or a Commit must satisfy, as functions of values; they raise the error the sender is told."""

from __future__ import annotations

from common.core import Req
from common.engine.kv_pages import ReadPage
from common.errors import DataLoss, FailedPrecondition, InvalidRequest, OutOfRange
from common.handoff.base import page_checksum, tokens_of
from decode_worker.commands import Commit
from decode_worker.ticket import Room, Ticket


def check_reserve(req: Req, *, pool_pages: int, page_size: int, max_context: int, is_local: bool = False) -> None:
    """Raises InvalidRequest if there is nothing to decode or the shape is wrong, OutOfRange if it never will fit (CAP-02)."""
    if is_local and req.output_len < 1:
        raise InvalidRequest("output_len", "must be at least 1", req.output_len)
    if not is_local and req.output_len < 2:
        raise InvalidRequest("output_len", "must be at least 2: the first token is the prefill worker's", req.output_len)
    if req.n > 1 and req.num_output:
        raise InvalidRequest("n", "must be 1 once there is output", req.n)
    total = len(req.input_ids) + req.output_len
    if total > max_context:
        raise OutOfRange("prompt and output together", f"must be at most {max_context} tokens", total)
    if total > pool_pages * page_size:
        raise OutOfRange("prompt and output together", f"must be at most {pool_pages * page_size} tokens, the pool's size", total)
    if (room := Room.of(req, page_size)).total > pool_pages:
        raise OutOfRange(f"prompt with n={req.n}", f"must take at most {pool_pages} pages, the pool's size", room.total)


def check_commit(ticket: Ticket, command: Commit) -> None:
    """Raises InvalidRequest if the first tokens are not this ticket's, FailedPrecondition if pages or checksums are missing."""
    req = ticket.req
    if len(command.first_tokens) != req.n:
        raise InvalidRequest("first_tokens", f"must be {req.n}, one per completion", len(command.first_tokens))
    for key, token in zip(ticket.keys, command.first_tokens, strict=True):
        if token.key[1:] != key[1:] or token.index != req.num_output:  # A token names no epoch on the wire.
            raise InvalidRequest("first_tokens", f"must be token {req.num_output} of work {key}", f"{token.index} of {token.key}")
    if command.pages_sent != len(ticket.page_ids):
        raise FailedPrecondition(f"pages are missing: {command.pages_sent} of {len(ticket.page_ids)} sent")
    if len(command.page_crc32) != (len(ticket.page_ids) if ticket.verify else 0):
        raise FailedPrecondition(f"checksums are missing: {len(command.page_crc32)} for {len(ticket.page_ids)} pages")


def check_bytes(ticket: Ticket, command: Commit, read_page: ReadPage, *, page_size: int) -> None:
    """Raises DataLoss unless each page has the checksum it was sent with: of its tokens alone if only they are sent."""
    input_len, prefix_len = len(ticket.ids), ticket.handle.length
    for index, (page, sent) in enumerate(zip(ticket.page_ids, command.page_crc32, strict=False)):
        tokens = tokens_of(index, input_len=input_len, prefix_len=prefix_len, page_size=page_size)
        data = read_page(page, tokens=len(tokens) if ticket.transport == "cuda_ipc" else page_size)
        if (found := page_checksum(data)) != sent:
            raise DataLoss(f"page {index} of ticket's {len(ticket.page_ids)}: checksum {sent:08x} sent, {found:08x} found")
