"""LocalPrompts: the prompts that this worker computes itself, into pages that a ticket holds (--local-prefill always).

A ticket is granted as for a sender, but to this engine: it gets a page table row and a place in the batch to come, its chunks are
computed between decode steps, and then it becomes completions like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.engine.first_tokens import take_first_tokens
from common.engine.flights import Flights
from common.engine.handle import Emit
from common.engine.pages import PagePool
from common.engine.prefilling import Prefilling
from common.engine.prompt import Prompt
from common.engine.runner import Runner, Sampled
from common.work import TokenOut
from decode_worker.events import PrefillStarted
from decode_worker.ticket import Ticket


class LocalPrompt(Prompt):
    """Has lengths of its own: the ticket's completions begin from the ticket's req."""

    def __init__(self, ticket: Ticket, row: int) -> None:
        super().__init__(replace(ticket.req, cached_len=ticket.handle.length, table_idx=row))
        self.ticket = ticket
        self.pages = ticket.handle.pages + ticket.page_ids
        self.computed_len = ticket.handle.length


class LocalPrompts:
    """Engine thread only. A ticket is here from start() until its first tokens are made or give_back(), exactly once; its pages
    and row are, until its last launched chunk has landed."""

    def __init__(
        self,
        runner: Runner,
        pool: PagePool,
        *,
        flights: Flights,
        chunk_tokens: int,
        max_running: int,
        num_completions: Callable[[], int],
        emit: Emit,
        on_computed: Callable[[Ticket, tuple[TokenOut, ...]], None],
    ) -> None:
        """chunk_tokens: budget of one step. num_completions: those that run or wait to. on_computed: takes the ticket over."""
        self._runner = runner
        self._pool = pool
        self._max_running = max_running
        self._num_completions = num_completions
        self._on_computed = on_computed
        self._prompts: dict[Ticket, LocalPrompt] = {}
        """In the order of their grants."""
        self._prefilling: Prefilling[LocalPrompt] = Prefilling(
            runner,
            flights=flights,
            chunk_tokens=chunk_tokens,
            on_start=lambda prompt: emit(PrefillStarted(prompt.req.key, prompt.cached_tokens)),
            on_landed=self._landed,
            on_dropped=self._remove_dropped,
        )

    def __len__(self) -> int:
        """Tickets given back not counted."""
        return len(self._live())

    @property
    def computed_tokens(self) -> int:
        """Since the start."""
        return self._prefilling.computed_tokens

    @property
    def remaining_tokens(self) -> int:
        return sum(prompt.remaining for prompt in self._live())

    def has_work(self) -> bool:
        return any(prompt.remaining > 0 for prompt in self._live())

    def may_start(self, ticket: Ticket) -> bool:
        """Its completions will find places in the batch as soon as they are made, so that nobody waits with computed pages."""
        if self._runner.page_table.num_free == 0:
            return False
        taken = self._num_completions() + sum(prompt.req.n for prompt in self._prompts.values())
        return taken == 0 or taken + ticket.req.n <= self._max_running

    def start(self, ticket: Ticket) -> None:
        """ticket: just granted, and may_start said yes."""
        table = self._runner.page_table
        prompt = self._prompts[ticket] = LocalPrompt(ticket, table.take_row())
        table.assign(prompt.req.table_idx, 0, prompt.pages)

    def launch(self) -> bool:
        """Launches one step of chunks; False if there are none."""
        return self._prefilling.launch(self._live())

    def give_back(self, ticket: Ticket) -> None:
        """Ends a ticket that was granted: at once, or when the chunk in the air that stores into its pages has landed."""
        prompt = self._prompts[ticket]
        prompt.is_broken = True
        if prompt.in_flight == 0:
            self._remove_dropped(prompt)

    def _live(self) -> list[LocalPrompt]:
        return [prompt for prompt in self._prompts.values() if not prompt.is_broken]

    def _remove_dropped(self, prompt: LocalPrompt) -> None:
        """The whole pages computed so far go to the prefix cache, the rest is freed."""
        self._remove(prompt)
        size = self._pool.page_size
        whole = prompt.computed_len // size
        grown = self._pool.insert(prompt.ids[: whole * size], prompt.pages[:whole], prompt.ticket.handle)
        self._pool.unlock(grown)
        self._pool.free(prompt.pages[whole:] + prompt.ticket.spare)

    def _landed(self, prompt: LocalPrompt, sampled: list[Sampled]) -> None:
        if not sampled:
            return
        eos = self._runner.eos_token_ids
        tokens = take_first_tokens(prompt.req, sampled, eos, cached_tokens=prompt.cached_tokens)
        self._remove(prompt)
        self._on_computed(prompt.ticket, tokens)

    def _remove(self, prompt: LocalPrompt) -> None:
        del self._prompts[prompt.ticket]
        self._runner.page_table.release_row(prompt.req.table_idx)
