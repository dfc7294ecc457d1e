"""A chat in the terminal: python -m examples.chat [--router 127.0.0.1:50051]

Ctrl-C stops an answer, /reset forgets the conversation, /quit or Ctrl-D leaves.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common import early_end

    early_end.begin()

import argparse
import asyncio
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import grpc
from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.patch_stdout import patch_stdout
from rich.console import Console
from rich.text import Text

from common import interactive
from common.config import LARGEST
from common.rpc.channels import explained
from common.rpc.client_options import ClientOptions, add_client_options
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1 import generation_pb2_grpc

NETWORK_PAUSE = timedelta(seconds=30)
"""How long a bad line may be silent: longer than between the parts of a cluster."""


class Chat:
    """A conversation with one router."""

    def __init__(self, channel: grpc.aio.Channel, console: Console, *, temperature: float, max_tokens: int) -> None:
        self._stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        self._console = console
        self._sampling = pb.SamplingParams(temperature=temperature, max_tokens=max_tokens)
        self._messages: list[pb.ChatMessage] = []

    async def model(self) -> str:
        """What is served. Raises AioRpcError."""
        model = await self._stub.GetModel(pb.GetModelRequest(), timeout=5)
        return f"{model.name}, {model.dtype or 'no workers yet'}, {model.max_context} tokens of context"

    def reset(self) -> None:
        self._messages.clear()

    async def ask(self, question: str) -> None:
        """Streams the answer to the console. A failed or stopped call leaves the conversation as it was before the question."""
        self._messages.append(pb.ChatMessage(role="user", content=question))
        request = pb.GenerateRequest(chat=pb.Chat(messages=self._messages), sampling=self._sampling)
        call = self._stub.Generate(request)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, call.cancel)
        try:
            answer = await self._stream(call)
        except grpc.aio.AioRpcError as error:
            self._messages.pop()
            self._console.print(Text(f"{error.code().name}: {error.details()}", style="red"))
        except asyncio.CancelledError:
            self._messages.pop()
            self._console.print("\n[dim]stopped")
        else:
            self._messages.append(pb.ChatMessage(role="assistant", content=answer))
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def _stream(self, call: Any) -> str:
        """The whole answer, once it has been shown. Raises AioRpcError, or CancelledError after call.cancel()."""
        began, first, tokens, answer = time.monotonic(), 0.0, 0, ""
        async for response in call:
            if response.HasField("delta"):
                first = first or time.monotonic()
                tokens += len(response.delta.token_ids)
                answer += response.delta.text
                self._console.print(response.delta.text, end="", markup=False, highlight=False, soft_wrap=True)
            elif response.HasField("finished"):
                self._summary(response.finished, seconds=time.monotonic() - first, tokens=tokens, ttft=first - began)
        return answer

    def _summary(self, finished: pb.Finished, *, seconds: float, tokens: int, ttft: float) -> None:
        rate = f"{(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else "one token"
        usage = finished.usage
        cut = ", cut off by the length limit" if finished.reason == pb.FINISH_REASON_LENGTH else ""
        counts = f"{usage.prompt_tokens} tokens in ({usage.cached_tokens} cached), {usage.completion_tokens} out"
        self._console.print(f"\n[dim]first token after {ttft * 1000:.0f} ms, {rate}, {counts}{cut}", highlight=False)


async def converse(chat: Chat, console: Console) -> None:
    session: PromptSession[str] = PromptSession()
    while True:
        try:
            with patch_stdout():
                typed = await session.prompt_async(HTML("<b>&gt; </b>"))
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        question = typed.encode(errors="replace").decode().strip()  # A terminal may send what is no UTF-8.
        if question == "/quit":
            return
        if question == "/reset":
            chat.reset()
            console.print("[dim]a new conversation")
        elif question.startswith("/"):
            console.print("[dim]/reset forgets the conversation, /quit leaves")
        elif question:
            await chat.ask(question)


def main() -> int:
    return asyncio.run(talk(_parser()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", default="127.0.0.1:50051", help="host:port (default: 127.0.0.1:50051)")
    parser.add_argument("--temperature", type=float, default=0.3, help="0 is greedy (default: 0.3)")
    parser.add_argument("--max-tokens", type=int, default=512, help="per answer (default: 512)")
    add_client_options(parser)
    return parser


async def talk(parser: argparse.ArgumentParser) -> int:
    """Raises StartError, ValueError."""
    arguments = parser.parse_args()
    if not 1 <= arguments.max_tokens <= LARGEST:
        parser.error(f"--max-tokens must be in [1, {LARGEST}], got {arguments.max_tokens}")
    console = Console()
    async with ClientOptions.of(arguments).connect(arguments.router, silence=NETWORK_PAUSE) as channel:
        chat = Chat(channel, console, temperature=arguments.temperature, max_tokens=arguments.max_tokens)
        try:
            console.print(Text(f"{await chat.model()}. /reset, /quit; Ctrl-C stops an answer", style="dim"))
        except grpc.aio.AioRpcError as error:
            print(f"error: no router answers on {arguments.router}: {explained(error.details() or '')}", file=sys.stderr)
            return 2
        await converse(chat, console)
    return 0


if __name__ == "__main__":
    early_end.over()
    sys.exit(interactive.run(main))
