"""Chats become the same prompt as transformers makes of them; what a template refuses is the client's error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from common.errors import FailedPrecondition, InvalidRequest, StartError
from router.request.valid_request import ChatPrompt, IdsPrompt, TextPrompt
from router.text.chat_template import ChatTemplate
from router.text.prompts import PromptReader
from router.text.tokenizer import Tokenizer
from tests.helpers.text_models import byte_level, write_model

pytestmark = pytest.mark.unit

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate: ' ~ m.role) }}{% endif %}
{{ m.content }}{{ eos_token }}{{ pad_token }}
{% endfor %}"""
TOOLS = """{% if tools is not none %}{{ tools | tojson(indent=2) }}{% elif tools %}no{% endif %}
{% if documents is none %}none{% endif %}{% if date is defined %}{{ date }}{% endif %}{{ {'<': 'é', 'b': messages} | tojson }}
{% for m in messages %}    {% generation %}{% set x = 'in' %}{{ m.content }}{% endgeneration %}{{ x is defined }}
{% endfor %}{% set ns = namespace(n=0) %}
{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n > 1 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"""
QWEN = """{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- set is_tool = m.content is string and m.content.startswith('<tool>') and m.content.endswith('</tool>') %}
    {%- if not ns.found and m.role == 'user' and not is_tool %}
        {%- set ns.found = true %}{%- set ns.last = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + (' <-' if loop.index0 == ns.last else '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TEMPLATES = {"qwen": QWEN, "chatml": CHATML, "llama": LLAMA, "tools": TOOLS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = [
    [("user", "hi")],
    [("system", " be <brief> & 'kind' \n"), ("user", "東京 😀"), ("assistant", ""), ("user", "\n{{ 7 * 7 }}\n")],
    [("user", "a"), ("assistant", "<think>why</think>\n\nb"), ("user", "c")],
]
KWARGS: list[dict[str, Any]] = [
    {},
    {"tools": [{"name": "f", "é": [1, None]}], "date": "today"},
    {"add_generation_prompt": False},
    {"enable_thinking": False},
]


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def reference(template: str, chat: list[dict[str, str]], kwargs: dict[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"add_generation_prompt": True, **SPECIAL, **kwargs}
    rendered: list[str] = render_jinja_template([chat], chat_template=template, **variables)[0]
    return rendered[0]


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_renders_as_transformers_renders_it(name: str, chat: list[tuple[str, str]], kwargs: dict[str, Any]) -> None:
    def ours() -> str:
        return ChatTemplate(TEMPLATES[name], SPECIAL).render(messages(chat), kwargs)

    if name == "llama" and chat[0][0] == "system":
        with pytest.raises(InvalidRequest, match="Roles must alternate: system"):
            ours()
    else:
        assert ours() == reference(TEMPLATES[name], messages(chat), kwargs)


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{{ raise_exception('No\nsystem role') }}", {}).render(messages([("system", "secret")]), {})
    assert str(caught.value) == "chat cannot be rendered by the model's chat template: No system role, got ['system']"
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.x.y }}",
        "{{ 1 / 0 }}",
        "{{ x() }}",
        "{{ messages[9]['role'] }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{{ strftime_now(5) }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_an_invalid_request(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat cannot be rendered by the model's chat template: "):
        ChatTemplate(template, {}).render(messages([("user", "hi")]), {"x": 5})


def test_the_error_of_a_template_is_always_sendable_text() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("{{ raise_exception(x) }}", {}).render(messages([("user", "hi")]), {"x": "\ud800" * 1000})
    assert len(str(caught.value).encode()) < 1000


def test_rendering_changes_no_message_and_keeps_no_state() -> None:
    template, chat = ChatTemplate(CHATML, SPECIAL), messages([("user", "hi")])
    first = template.render(chat, {"add_generation_prompt": False, "bos_token": "X"})
    assert template.render(chat, {}) == first + "<|im_start|>assistant\n" and chat == messages([("user", "hi")])


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(StartError, match="the model's chat template is not valid at line 2"):
        ChatTemplate("a\n{% for %}", {})


async def test_each_form_of_prompt_becomes_ids(tmp_path: Path) -> None:
    model = write_model(
        tmp_path,
        byte_level(),
        chat_template="{{ eos_token }}{{ messages[0].content }}",
        tokenizer_config={"eos_token": "<|end|>"},
    )
    tokenizer = Tokenizer(model)
    reader = PromptReader(model, tokenizer)
    assert reader.takes_chats
    assert await reader.ids(IdsPrompt([3, 4])) == [3, 4]
    assert await reader.ids(TextPrompt("Paris")) == tokenizer.encode("Paris")
    for content in ("Paris", "Paris " * 5000):
        assert await reader.ids(ChatPrompt(messages([("user", content)]), {})) == tokenizer.encode("<|end|>" + content)
    assert await reader.ids(ChatPrompt(messages([("user", "x")]), {"eos_token": ""})) == tokenizer.encode("x")


async def test_a_chat_to_a_model_without_template_is_a_failed_precondition(tmp_path: Path) -> None:
    model = write_model(tmp_path, byte_level())
    reader = PromptReader(model, Tokenizer(model))
    assert not reader.takes_chats
    with pytest.raises(FailedPrecondition, match="no chat template"):
        await reader.ids(ChatPrompt(messages([("user", "x")]), {}))
