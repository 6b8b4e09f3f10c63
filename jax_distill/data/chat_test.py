"""Chat templates: the assistant's words are targets and nothing else, found by either way."""

import json

import numpy as np
import pytest

from jax_distill.config import Refusal
from jax_distill.data import Tokenizer, read_documents, train_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}<|im_end|>{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As Qwen3: an earlier turn's thoughts are left out once another user message follows.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}"
    "{{ message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3's first release: the header comes whether it is asked for or not.
ALWAYS_HEADER = LLAMA3.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}")
MARKS = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TALK = [
    {"role": "system", "content": "Be brief, please."},
    {"role": "user", "content": "What is ½ of 文字 😀?"},
    {"role": "assistant", "content": "One half; <|im|> is no mark. 😀"},
    {"role": "user", "content": "And\nthen?"},
    {"role": "assistant", "content": "That is all."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE with the marks of ChatML and Llama 3 as special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([json.dumps(TALK, ensure_ascii=False)] * 3, 300, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    for index, mark in enumerate(MARKS):
        tokens["added_tokens"].append(dict(tokens["added_tokens"][0], id=300 + index, content=mark))
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    return folder


def with_template(folder, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template, newline="")
    return Tokenizer.load(folder)


def said(tokenizer: Tokenizer, messages) -> str:
    document = tokenizer.chat(messages)
    assert document.tokens.shape == document.targets.shape
    return tokenizer.decode(document.tokens[document.targets])


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "generation"])
def test_chatml_targets_are_the_assistants_words_and_the_mark_that_ends_them(folder, template):
    tokenizer = with_template(folder, template)
    document = tokenizer.chat(TALK)
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    assert tokenizer.decode(document.tokens) == expected
    assert (
        said(tokenizer, TALK) == "One half; <|im|> is no mark. 😀<|im_end|>That is all.<|im_end|>"
    )
    edges = np.flatnonzero(np.diff(document.targets.astype(int)))
    assert len(edges) == 4  # two runs


def test_llama3_has_one_bos_and_trims(folder):
    tokenizer = with_template(folder, LLAMA3)
    talk = [TALK[1], {"role": "assistant", "content": "  spaced \n"}]
    document = tokenizer.chat(talk)
    assert document.tokens[0] == tokenizer.bos_id and (document.tokens == 0).sum() == 1
    assert said(tokenizer, talk) == "spaced<|eot_id|>"
    assert document.targets[-1] and not document.targets[0]


def test_thoughts_that_the_template_leaves_out_are_no_targets(folder):
    tokenizer = with_template(folder, FORGETFUL)
    talk = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>hm</think>Yes."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>oh</think>No."},
    ]
    assert said(tokenizer, talk) == "Yes.<|im_end|><think>oh</think>No.<|im_end|>"
    assert "hm" not in tokenizer.decode(tokenizer.chat(talk).tokens)


def test_a_turn_that_cannot_be_found_is_refused_not_guessed(folder):
    last = "loop.last and message.role == 'assistant'"  # as gpt-oss: the last turn ends otherwise
    other_end = FORGETFUL.replace("<|im_end|>", "{{'<|eot_id|>' if LAST else '<|im_end|>'}}")
    other_end = other_end.replace("LAST", last)
    shortened = "{{ messages | length }} messages: " + CHATML
    for template in (other_end, shortened):
        tokenizer = with_template(folder, template)
        with pytest.raises(Refusal, match="{% generation %}"):
            tokenizer.chat(
                [*TALK[:2], {"role": "assistant", "content": "<think>a</think>b"}, *TALK[3:]]
            )
    with pytest.raises(Refusal, match="{% if add_generation_prompt %}"):
        with_template(folder, ALWAYS_HEADER).chat(TALK)


def test_a_template_without_a_header_is_taken(folder):
    plain = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    talk = [TALK[1], {"role": "assistant", "content": "What is it?"}, TALK[3], TALK[4]]
    tokenizer = with_template(folder, plain)
    assert said(tokenizer, talk) == " What is it?<|endoftext|> That is all.<|endoftext|>"


def test_templates_see_what_transformers_shows_them_and_a_fixed_day(folder):
    tokenizer = with_template(
        folder,
        "{{ strftime_now('%d %b %Y') }} {{ {'é': '<'} | tojson }} {{ eos_token }}"
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{{ m.content }}{% endfor %}",
    )
    talk = [{"role": "tool", "content": "skipped"}, {"role": "user", "content": " shown"}]
    text = tokenizer.decode(tokenizer.chat(talk).tokens)
    assert text == '26 Jul 2024 {"é": "<"} <|endoftext|> shown'


def test_the_template_runs_in_a_sandbox(folder):
    tokenizer = with_template(folder, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Refusal, match="unsafe"):
        tokenizer.chat(TALK)
    changing = with_template(folder, "{{ messages.append(1) }}")
    with pytest.raises(Refusal):
        changing.chat(TALK)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, "expected messages to be a list"),
        ({"messages": None}, "expected messages to be a list"),
        ({"messages": ["hello"]}, "expected message 0 to have a role"),
        ({"messages": [{"content": "a"}]}, "expected message 0 to have a role"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "noncharacter"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "only user and assistant"),
        ({"text": "a"}, "expected the key messages, got text"),
    ],
)
def test_bad_conversations_name_file_and_line(folder, tmp_path, row, message):
    guard = "{% if messages[0].role == 'robot' %}{{ raise_exception('only user and assistant') }}"
    tokenizer = with_template(folder, guard + "{% endif %}" + CHATML)
    good = {"messages": TALK}
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (good, good, row)))
    with pytest.raises(Refusal, match=message) as caught:
        read_documents(str(file), format="chat", tokenizer=tokenizer, heldout_fraction=0.0)
    assert str(caught.value).startswith(f"{file}:3: ")


def test_chat_files_are_read_whole_and_what_has_no_target_is_counted(folder, tmp_path):
    tokenizer = with_template(folder, CHATML)
    talks = [TALK, TALK[:3], TALK[:2]]
    empty = [[]]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks + empty))
    corpus = read_documents(str(file), format="auto", tokenizer=tokenizer, heldout_fraction=0.0)
    assert corpus.counts.documents == 3 and corpus.counts.untargeted_documents == 1
    assert corpus.counts.empty_documents == 1
    assert "1 documents with nothing to predict" in str(corpus.counts)
    lengths = sorted(len(tokenizer.chat(talk).tokens) for talk in talks)
    assert sorted(len(document.tokens) for document in corpus.train) == lengths


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
    with pytest.raises(Refusal, match="jinja2"):
        Tokenizer.load(tmp_path).chat(TALK)
