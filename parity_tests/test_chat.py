"""Proves: a conversation has the same token ids, and the same assistant tokens, as transformers'
`apply_chat_template` gives with the same folder; and a text the same ids as its tokenizer."""

import numpy as np
import pytest
import transformers

from jax_distill.data import Tokenizer, train_tokenizer
from jax_distill.data.chat_test import marked_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML_MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}<|im_end|>{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# The same without the marks: there the parts are found by prefixes.
CHATML = CHATML_MARKED.replace("{%- generation %}{{", "{{-").replace("{% endgeneration %}", "")
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
TALKS = [
    [
        {"role": "system", "content": "Be brief — naïve, if need be."},
        {"role": "user", "content": "What is ½ of 文字 😀?\n\n\tTell me."},
        {"role": "assistant", "content": "One half. 😀 e\u0301"},
        {"role": "user", "content": "  spaces  "},
        {"role": "assistant", "content": "\n"},
        {"role": "user", "content": "{{ bos_token }} <|im end|> & <b>"},
        {"role": "assistant", "content": 'It\'s 100% <|end of text|> "so".'},
    ],
    [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}],
    [{"role": "user", "content": "no answer"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return marked_tokenizer(tmp_path_factory.mktemp("chat"), TALKS, 320, MARKS)


def both(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "template", [CHATML, CHATML_MARKED, LLAMA3], ids=["chatml", "marked", "llama3"]
)
@pytest.mark.parametrize("talk", TALKS, ids=["long", "empty answer", "no answer"])
def test_token_ids_are_transformers_own(folder, template, talk):
    ours, theirs = both(folder, template)
    expected = theirs.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]
    assert ours.chat.document(talk).tokens.tolist() == expected


@pytest.mark.parametrize("talk", TALKS[:2], ids=["long", "empty answer"])
def test_assistant_tokens_are_transformers_own(folder, talk):
    ours, theirs = both(folder, CHATML_MARKED)
    expected = theirs.apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    marked = ours.chat.document(talk).targets
    assert marked.tolist() == [bool(value) for value in expected] and marked.any()
    found = both(folder, CHATML)[0].chat.document(talk).targets
    assert np.array_equal(found, marked)  # the same without the marks


STRADDLING = (
    "{% for m in messages %}{{ m.role | upper }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def test_a_token_across_header_and_answer_is_the_assistants_for_both(tmp_path):
    """The token ` true` begins in the header and ends in the answer."""
    train_tokenizer(["USER: is it? ASSISTANT: true"] * 50, 300, tmp_path)
    talk = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "true"}]
    ours, theirs = both(tmp_path, STRADDLING)
    expected = theirs.apply_chat_template(
        talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    document = ours.chat.document(talk)
    assert document.targets.tolist() == [bool(value) for value in expected]
    answer = ours.decode(document.tokens[document.targets])
    assert answer == " true<|endoftext|>"


def test_control_tokens_of_a_message_are_what_transformers_makes_of_them_as_text(folder):
    """Its `split_special_tokens` reads the pieces between the template's own control tokens."""
    ours, theirs = both(folder, CHATML)
    sentence = "The mark <|im_end|> ends a turn; <|endoftext|> ends all."
    talk = [{"role": "user", "content": sentence}, {"role": "assistant", "content": "<|im_end|>"}]
    expected = []
    for message in talk:
        text = f"{message['role']}\n{message['content']}"
        pieces = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        marks = [theirs.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        expected += [
            marks[0],
            *pieces,
            marks[1],
            *theirs("\n", add_special_tokens=False)["input_ids"],
        ]
    document = ours.chat.document(talk)
    assert document.tokens.tolist() == expected
    assert ours.decode(document.tokens[document.targets]) == "<|im_end|><|im_end|>"


def test_text_ids_and_special_ids_are_transformers_own(folder):
    ours, theirs = both(folder, CHATML)
    for message in TALKS[0]:
        text = message["content"]
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_batch([text])[0].tolist() == ours.encode(text).tolist()
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.length == len(theirs) and ours.vocab == theirs.get_vocab()
