"""The model's chat template: messages to the text of a prompt, as transformers' apply_chat_template renders it.

Templates come with models and are not trusted: they run in jinja2's sandbox. Whatever a template raises over a client's
messages is the client's INVALID_ARGUMENT; a template that does not compile stops the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidRequest, StartError


class ChatTemplate:
    """One compiled template. Rendering keeps no state."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: variables for the template, e.g. {"bos_token": "<s>"}. Raises StartError on bad syntax."""
        try:
            self._template = _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise StartError(f"the model's chat template is not valid at line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], kwargs: Mapping[str, Any]) -> str:
        """The prompt up to where the assistant's answer begins. kwargs: more variables; they win over the others.
        Raises InvalidRequest with the template's own words when it refuses the messages or fails over them."""
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens, **kwargs}
        try:
            return self._template.render({**variables, "messages": [dict(message) for message in messages]})
        except Exception as error:  # the template is a program of the model's publisher: it may raise anything
            reason = str(error).encode(errors="replace").decode() or type(error).__name__
            rule = "cannot be rendered by the model's chat template"
            roles = [message["role"] for message in messages]
            raise InvalidRequest("chat", f"{rule}: {' '.join(reason.split())[:300]}", roles, log_rule=rule) from None


class _Generation(Extension):
    """{% generation %} marks the assistant's part for training; here it only shows its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, so that variables set inside stay inside, as where it is tracked.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
