"""Chat templates as programs: what they see, where they stand, what they do to their process."""

import json
import os
import signal

import pytest
import tokenizers

from jax_distill.base.errors import UserError
from jax_distill.data import Tokenizer, train_tokenizer
from jax_distill.data.chat import Chat
from jax_distill.data.chat_test import CHATML, TALK, folder, rows_of, said, with_template
from jax_distill.data.template import Limits

__all__ = ["folder"]


def test_templates_see_what_transformers_shows_them_and_a_fixed_day(folder):
    tokenizer = with_template(
        folder,
        "{{ strftime_now('%d %b %Y') }} {{ {'é': '<'} | tojson }} {{ eos_token }}"
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endfor %}",
    )
    talk = [{"role": "tool", "content": "skipped"}, {"role": "user", "content": " shown"}]
    text = tokenizer.decode(tokenizer.chat.document(talk).tokens)
    assert text == '26 Jul 2024 {"é": "<"} <|endoftext|> shown'


def test_the_template_runs_in_a_sandbox(folder):
    tokenizer = with_template(folder, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="unsafe"):
        tokenizer.chat.document(TALK)
    changing = with_template(folder, "{{ messages.append(1) }}")
    with pytest.raises(UserError):
        changing.chat.document(TALK)


def test_templates_in_tokenizer_config_are_read_in_both_forms(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": CHATML},
    ]
    for template in (CHATML, named):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert said(Tokenizer.load(tmp_path), TALK[:3]).startswith("One half")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(UserError, match="jinja2"):
        Tokenizer.load(tmp_path).chat.document(TALK)


def test_a_missing_or_broken_template_is_no_fault_of_a_line(tmp_path):
    train_tokenizer(["Hi? Ho."], 260, tmp_path)
    for template, message in ((None, "expected a chat template, got none"), ("{% if %}", "jinja2")):
        if template:
            (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(UserError, match=message) as caught:
            rows_of(tmp_path, Tokenizer.load(tmp_path), [{"messages": TALK}])
        assert "chat.jsonl" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content * 10 ** 100 }}", "OverflowError"),
        ("{{ messages[99].content }}", "has no element 99"),
        ("{{ messages[1].content.encode('latin-1') }}", "UnicodeEncodeError"),
        ("{{ messages[0].content.encode() }}", "a bytes that is written without tojson"),
        ("{{ messages[0]['content'].index('zzz') }}", "ValueError"),
        ("{{ none + 1 }}", "unsupported operand"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{% include 'other' %}", "."),
        ("{% set ns = namespace(a=1) %}{{ ns.a.b.c }}", "."),
        ("{{ raise_exception('a\nb') }}", "a\nb"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "range"),
        ("{{ undefined_function() }}", "undefined"),
    ],
)
def test_every_exception_of_a_template_is_a_refusal(folder, template, problem):
    tokenizer = with_template(folder, template)
    for _ in range(2):  # the process lives on
        with pytest.raises(
            UserError, match=f"expected messages that the .* takes, got .*{problem}"
        ):
            tokenizer.chat.document(TALK)
    tokenizer.chat.close()


LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}BODY{% endfor %}{% endfor %}"
SMALL = Limits(seconds=0.2, memory=300 << 20, characters=10**6)


@pytest.mark.parametrize(
    ("template", "limits", "problem"),
    [
        (LOOP.replace("BODY", ""), SMALL, "within 0.2 s of processor time"),
        ("{{ 7 ** (10 ** 8) }}", SMALL, "within 0.2 s of processor time"),
        (LOOP.replace("BODY", "x" * 999), Limits(characters=10**6), "at most 1,000,000 characters"),
        ("{{ (messages[0].content * 10 ** 9) | length }}", SMALL, "more memory than it may"),
        ("{% set x = 'a' * 10 ** 9 %}{{ x }}", SMALL, "more memory than it may"),
    ],
)
def test_a_template_has_limits_and_its_process_ends(folder, template, limits, problem):
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    chat = Chat(core, template, values={}, limits=limits)
    for _ in range(2):
        with pytest.raises(UserError, match=problem):
            chat.document(TALK)
    chat.close()


def test_the_process_of_a_template_ends_with_the_reading(folder, tmp_path):
    tokenizer = with_template(folder, CHATML)
    tokenizer.chat.document(TALK)
    process = tokenizer.chat._template._process
    assert process.poll() is None
    rows_of(tmp_path, tokenizer, [{"messages": TALK}])
    assert process.returncode is not None and tokenizer.chat._template._process is None
    tokenizer.chat.document(TALK)  # another one
    os.kill(tokenizer.chat._template._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match="its process ended with SIGKILL"):
        tokenizer.chat.document(TALK)
    tokenizer.chat.document(TALK)
    process = tokenizer.chat._template._process
    del tokenizer
    assert process.returncode is not None
