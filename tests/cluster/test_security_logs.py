"""Nobody's words in anybody's log, at the chattiest level, unless --log-prompts asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.cluster.conftest import SMALL
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster

pytestmark = pytest.mark.cluster

SECRET = "xyzzyQUUX"
SHORT = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def chatty(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Everything logs at debug level; KV goes by gRPC, one engine is a process of its own."""
    with Cluster(
        tmp_path_factory.mktemp("chatty"),
        tiny,
        worker_args=[*SMALL, "--log-level", "debug"],
        prefill_args=["--transport", "grpc", "--chunk-tokens", "8"],
        decode_args=["--engine", "process"],
        router_args=["--log-level", "debug"],
    ) as running:
        yield running


def chat(text: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])


async def say_it_everywhere(client: Client) -> list[str]:
    """The secret in every field that takes text, in requests that succeed, fail and end early; what came back."""
    answers = [(await client.generate(SECRET, sampling=SHORT, logprobs=5)).text]
    answers.append((await client.generate(chat(SECRET), stop=[SECRET], sampling=SHORT)).text)
    await client.stub.Tokenize(pb.TokenizeRequest(text=SECRET), timeout=5)
    ids = (await client.stub.Tokenize(pb.TokenizeRequest(text=SECRET * 3), timeout=5)).token_ids
    await client.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=5)
    await client.stub.Abort(pb.AbortRequest(request_id="nobody"), timeout=5)
    call = client.call(SECRET * 4, sampling={"max_tokens": 500, "ignore_eos": True})
    await first_event(call, "delta")
    call.cancel()
    late = client.call(SECRET * 5, sampling={"max_tokens": 900, "ignore_eos": True}, timeout=0.05)
    assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    bad = [
        client.call(SECRET * 1000),
        client.call(SECRET, stop=[SECRET * 200]),
        client.call(SECRET, json_schema=SECRET),
        client.call(pb.Chat(messages=[pb.ChatMessage(role=SECRET, content=SECRET)])),
        client.call(pb.Chat(messages=chat(SECRET).messages, template_kwargs_json=SECRET)),
        client.call(pb.Chat(messages=chat(SECRET).messages, template_kwargs_json=f'["{SECRET}"]')),
        client.call(SECRET, sampling={"top_p": 7.0}),
    ]
    for call in bad:
        assert await call.code() is not grpc.StatusCode.OK
    return answers


async def test_no_process_logs_a_prompt_or_an_answer_at_debug_level(chatty: Cluster) -> None:
    async with chatty.client() as client:
        answers = await say_it_everywhere(client)
        ids = list((await client.stub.Tokenize(pb.TokenizeRequest(text=SECRET), timeout=5)).token_ids)
        await chatty.assert_idle(client)
    for process in chatty.processes:
        output = process.output
        assert " DEBUG " in output or process is not chatty.router, "the level was not debug"
        assert SECRET not in output, _around(output, SECRET)
        for text in answers:
            assert text[:8] not in output, _around(output, text[:8])
        for ids_text in (str(ids)[1:-1], str(ids)[:20]):
            assert ids_text not in output, _around(output, ids_text)


async def test_log_prompts_logs_them_with_the_request_s_id(tiny: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, tiny, worker_args=SMALL, router_args=["--log-prompts"]) as cluster:
        async with cluster.client() as client:
            await client.generate(SECRET, request_id="mine", sampling=SHORT)
            await client.generate(chat(SECRET + "2"), sampling=SHORT)
            await cluster.assert_idle(client)
        lines = cluster.router.output.splitlines()
        assert any(f"'{SECRET}'" in line and line.endswith("[mine]") for line in lines)
        assert any(SECRET + "2" in line for line in lines)
        assert not any(SECRET in worker.output for worker in (*cluster.prefill, *cluster.decode))


def _around(output: str, text: str) -> str:
    at = output.index(text)
    return output[max(0, at - 300) : at + 300]
