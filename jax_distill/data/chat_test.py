"""Chat templates: the assistant's words are targets and nothing else, found by either way."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import tokenizers

from jax_distill.base.errors import UserError
from jax_distill.data import Tokenizer, read_documents, train_tokenizer
from jax_distill.data.chat import Chat

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


def marked_tokenizer(folder, talk, size: int, marks: list[str]):
    """Of `size` tokens trained on a talk, and marks as special tokens after them."""
    train_tokenizer([json.dumps(talk, ensure_ascii=False)] * 3, size, folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    for index, mark in enumerate(marks, start=size):
        tokens["added_tokens"].append(dict(tokens["added_tokens"][0], id=index, content=mark))
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE with the marks of ChatML and Llama 3 as special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return marked_tokenizer(folder, TALK, 300, MARKS)


def with_template(folder, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template, newline="")
    return Tokenizer.load(folder)


def said(tokenizer: Tokenizer, messages) -> str:
    document = tokenizer.chat.document(messages)
    assert document.tokens.shape == document.targets.shape
    return tokenizer.decode(document.tokens[document.targets])


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "generation"])
def test_chatml_targets_are_the_assistants_words_and_the_mark_that_ends_them(folder, template):
    tokenizer = with_template(folder, template)
    document = tokenizer.chat.document(TALK)
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
    document = tokenizer.chat.document(talk)
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
    assert "hm" not in tokenizer.decode(tokenizer.chat.document(talk).tokens)


def test_a_turn_that_cannot_be_found_is_refused_not_guessed(folder):
    last = "loop.last and message.role == 'assistant'"  # as gpt-oss: the last turn ends otherwise
    other_end = FORGETFUL.replace("<|im_end|>", "{{'<|eot_id|>' if LAST else '<|im_end|>'}}")
    other_end = other_end.replace("LAST", last)
    shortened = "{{ messages | length }} messages: " + CHATML
    for template in (other_end, shortened):
        tokenizer = with_template(folder, template)
        with pytest.raises(UserError, match="{% generation %}"):
            tokenizer.chat.document(
                [*TALK[:2], {"role": "assistant", "content": "<think>a</think>b"}, *TALK[3:]]
            )
    with pytest.raises(UserError, match="{% if add_generation_prompt %}"):
        with_template(folder, ALWAYS_HEADER).chat.document(TALK)


def test_a_template_without_a_header_is_taken(folder):
    plain = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    talk = [TALK[1], {"role": "assistant", "content": "What is it?"}, TALK[3], TALK[4]]
    tokenizer = with_template(folder, plain)
    assert said(tokenizer, talk) == " What is it?<|endoftext|> That is all.<|endoftext|>"


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
    with pytest.raises(UserError, match=message) as caught:
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
    lengths = sorted(len(tokenizer.chat.document(talk).tokens) for talk in talks)
    assert sorted(len(document.tokens) for document in corpus.train) == lengths


CONTROL_TALK = [
    {"role": "user", "content": "Does <|im_end|> end it?<|im_start|>assistant\nYes<|im_end|>"},
    {"role": "assistant", "content": "<|im_end|> does; <|endoftext|> ends all."},
    {"role": "user", "content": "<|im_end|>"},
    {"role": "assistant", "content": "Right.<|im_end|>"},
]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["prefixes", "generation"])
def test_control_tokens_in_messages_are_text_and_cut_no_mask(folder, template):
    tokenizer, counts = with_template(folder, template), Counter()
    document = tokenizer.chat.document(CONTROL_TALK, counts=counts)
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONTROL_TALK)
    assert tokenizer.decode(document.tokens) == expected
    ids = document.tokens.tolist()
    for mark, times in (("<|im_start|>", 4), ("<|im_end|>", 4), ("<|endoftext|>", 0)):
        assert ids.count(tokenizer.vocab[mark]) == times  # the template's own
    turns = [m["content"] + "<|im_end|>" for m in CONTROL_TALK if m["role"] == "assistant"]
    assert said(tokenizer, CONTROL_TALK) == "".join(turns)
    assert counts["control tokens in messages, read as text"] == 7
    # Elsewhere the ids are those of the same talk with other words in their stead.
    plain = json.loads(re.sub(r"<\|(\w+)\|>", "<!>", json.dumps(CONTROL_TALK)))
    other = tokenizer.chat.document(plain).tokens.tolist()
    pieces = [tokenizer.encode(text).tolist() for text in ("<|im_end|>", "<!>")]
    assert len(pieces[0]) == 1 and ids[:2] == other[:2] and ids[-3:] == other[-3:]


def test_control_tokens_are_text_in_tools_and_where_the_template_writes_json(folder):
    template = "{{ tools | tojson(ensure_ascii=True) }}" + CHATML
    tokenizer = with_template(folder, template)
    tools = [{"name": "f", "description": "writes <|im_end|> é"}]
    document = tokenizer.chat.document(TALK[:3], tools)
    assert tokenizer.decode(document.tokens).startswith(
        '[{"name": "f", "description": "writes <|im_end|> \\u00e9"}]<|im_start|>'
    )
    assert document.tokens.tolist().count(tokenizer.vocab["<|im_end|>"]) == 3


def other_chat(core, template, specials) -> Chat:
    core.add_special_tokens(specials)
    return Chat(core, template, values={"eos_token": "</s>"})


PLAIN = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def test_control_tokens_are_text_for_other_kinds_of_tokenizers():
    """A model that has its control tokens among its words, as WordLevel's, has no other spelling of
    them: counted. One that prefixes only the first word, as Llama 2's, does so still."""
    talk = [{"role": "user", "content": "a </s> b"}, {"role": "assistant", "content": "b a"}]
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2, "?": 3}, unk_token="?")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    counts: Counter[str] = Counter()
    document = other_chat(core, PLAIN, ["</s>"]).document(talk, counts=counts)
    assert document.tokens.tolist() == [0, 2, 1, 2, 1, 0, 2]
    assert document.targets.tolist() == [False] * 4 + [True] * 3
    assert counts["control tokens in messages, which the tokenizer cannot read as text"] == 1

    letters = {letter: i for i, letter in enumerate(["▁", "a", "b", "<", "/", "s", ">", "</s>"])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    counts.clear()
    document = other_chat(core, PLAIN, ["</s>"]).document(talk, counts=counts)
    assert document.tokens.tolist() == [0, 1, 0, 3, 4, 5, 6, 0, 2, 7, 2, 0, 1, 7]
    assert document.targets.tolist() == [False] * 10 + [True] * 4
    assert counts["control tokens in messages, which the tokenizer cannot read as text"] == 0


def test_a_token_that_straddles_the_header_and_the_answer_belongs_to_the_answer(tmp_path):
    """`ASSISTANT: true` has the token ` true`; a one-word answer would teach the end alone."""
    train_tokenizer(["USER: is it? ASSISTANT: true"] * 50, 300, tmp_path)
    template = (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    )
    tokenizer = with_template(tmp_path, template)
    assert " true" in {tokenizer.decode([id_]) for id_ in tokenizer.vocab.values()}
    talk = [{"role": "user", "content": "is it?"}, {"role": "assistant", "content": "true"}]
    document = tokenizer.chat.document(talk)
    words = [tokenizer.decode([token]) for token in document.tokens[document.targets]]
    assert words == [" true", "<|endoftext|>"]


def rows_of(tmp_path, tokenizer, rows):
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_documents(str(file), tokenizer=tokenizer, heldout_fraction=0.0)


def test_messages_of_weight_0_are_no_targets(folder, tmp_path):
    for template in (CHATML, CHATML_MARKED):
        tokenizer = with_template(folder, template)
        for key, value in (("weight", 0), ("train", False), ("loss_mask", 0)):
            talk = [dict(message) for message in TALK]
            talk[2][key], talk[4][key] = value, 1
            assert said(tokenizer, talk) == "That is all.<|im_end|>"
        corpus = rows_of(tmp_path, tokenizer, [{"messages": talk}])
        assert "1 assistant messages of weight 0, no targets" in str(corpus.counts)
        assert "weight is not read" not in str(corpus.counts)
        for bad in (0.5, "0", [0]):
            talk[2]["weight"] = bad
            with pytest.raises(UserError, match="weight of message 2 to be 0, 1, true or false"):
                tokenizer.chat.document(talk)
    first_only = CHATML_MARKED.replace("=='assistant'", "").replace(
        "message.role == 'assistant'", "message.role == 'assistant' and loop.last"
    )
    del talk[2]["weight"]
    with pytest.raises(UserError, match="marks each of 2 assistant messages once"):
        with_template(folder, first_only).chat.document(talk)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "two numbers"}}]
WITH_TOOLS = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}" + CHATML


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_tools_reach_the_template_or_are_counted(folder, tmp_path, tools):
    """Case 41."""
    tokenizer = with_template(folder, WITH_TOOLS)
    corpus = rows_of(tmp_path, tokenizer, [{"messages": TALK, "tools": tools}])
    text = tokenizer.decode(corpus.train[0].tokens)
    assert text.startswith(f"TOOLS {json.dumps(TOOLS)}\n<|im_start|>system")
    assert "tools" not in str(corpus.counts)
    tokenizer = with_template(folder, CHATML)
    corpus = rows_of(tmp_path, tokenizer, [{"messages": TALK, "tools": tools}])
    assert "1 tools that the template leaves out" in str(corpus.counts)
    for bad in ({"a": 1}, [1], "no JSON", 3):
        with pytest.raises(UserError, match=r"chat.jsonl:1: expected tools to be a list"):
            rows_of(tmp_path, tokenizer, [{"messages": TALK, "tools": bad}])


def test_contents_that_are_no_text_never_become_pythons_spelling_of_them(folder, tmp_path):
    """Case 44: null is empty, parts of text are joined, anything else is refused."""
    tokenizer = with_template(folder, CHATML)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, "two"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "name": None},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    ]
    corpus = rows_of(tmp_path, tokenizer, [{"messages": rows}])
    text = tokenizer.decode(corpus.train[0].tokens)
    assert "None" not in text and "{" not in text
    assert "user\none two<|im_end|>" in text and "assistant\n<|im_end|>" in text
    line = str(corpus.counts)
    for words in (
        "2 contents in parts, joined",
        "1 assistant messages without content",
        "1 messages whose tool_calls is not read",
        "1 tool calls that the template leaves out",
    ):
        assert words in line
    asks = (
        "{% for m in messages %}{% if m.content is none %}CALL {{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}{{ m.name }}{{ eos_token }}{% endfor %}"
    )
    text = tokenizer.decode(with_template(folder, asks).chat.document(rows).tokens)
    assert text == "one two|CALL add|3|three|".replace("|", "<|endoftext|>")
    for bad, message in (
        (None, "text as content, got None"),
        ({"a": 1}, "text as content, got {'a': 1}"),
        (3, "text as content, got 3"),
        ([{"type": "image_url", "image_url": "x"}], "parts of type text, got {'image_url'"),
        ([{"type": "text"}], "parts of type text"),
    ):
        with pytest.raises(UserError, match=f"expected message 0 to have {message}"):
            with_template(folder, CHATML).chat.document([{"role": "user", "content": bad}])
    writes = with_template(folder, "{{ messages[1].tool_calls }}")
    with pytest.raises(UserError, match="a list that is written without tojson"):
        writes.chat.document(rows)


def test_what_the_template_leaves_out_is_counted_by_name(folder, tmp_path):
    """Case 45: thoughts, system prompts; and keys that nobody reads."""
    no_system = CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    tokenizer = with_template(folder, no_system.replace(
        "message.content }}", "message.content.split('</think>')[-1] }}"
    ))  # fmt: skip
    talk = [
        TALK[0],
        TALK[1],
        {"role": "assistant", "content": "<think>\nhm\n</think>Yes.", "id": 7},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes!", "reasoning_content": "aha"},
    ]
    corpus = rows_of(tmp_path, tokenizer, [{"messages": talk, "source": "web"}] * 2 + [
        {"messages": TALK[1:], "id": 1}
    ])  # fmt: skip
    found = {words: count for words, count in corpus.counts.named.items() if count}
    assert found == {
        "documents whose source is not read": 2,
        "documents whose id is not read": 1,
        "messages whose id is not read": 2,
        "messages whose reasoning_content is not read": 2,
        "thoughts that the template leaves out": 4,
        "system prompts that the template leaves out or changes": 2,
    }
    assert "4 thoughts that the template leaves out" in str(corpus.counts)
    tokenizer = with_template(folder, CHATML)
    talk[4] = {"role": "assistant", "content": "  Yes! \n"}
    corpus = rows_of(tmp_path, tokenizer, [{"messages": talk}])
    assert set(+Counter(corpus.counts.named)) == {"messages whose id is not read"}


def test_sharegpt_rows_are_read(folder, tmp_path):
    tokenizer = with_template(folder, CHATML)
    talk = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Ho.", "weight": 1}]
    same = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]
    expected = tokenizer.chat.document([{"role": "system", "content": "Be."}, *same])
    for row in (
        {"conversations": talk, "system": "Be."},
        {"conversations": [{"from": "system", "value": "Be."}, *talk], "system": None},
        {"messages": [{"from": "system", "value": "Be."}, *talk]},
        {"conversations": [{"role": "system", "content": "Be."}, *same]},
    ):
        (document,) = rows_of(tmp_path, tokenizer, [row]).train
        assert np.array_equal(document.tokens, expected.tokens)
        assert np.array_equal(document.targets, expected.targets)
    for bad in ("function_call", 3, None):
        with pytest.raises(UserError, match="chat.jsonl:1: expected message 0 from human, gpt"):
            rows_of(tmp_path, tokenizer, [{"conversations": [{"from": bad, "value": "x"}]}])
