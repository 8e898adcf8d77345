"""The tokenizer of a folder: template, end tokens, round trip."""

from __future__ import annotations

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from moerl.data.chat import ChatTokenizer
from moerl.data.rows import Row
from moerl.data.templating import resolve_template
from moerl.errors import DataError

WORDS = ["<pad>", "<eos>", "<user>", "<bot>", "\\boxed{", "}", *"0123456789+-=?, \nabc"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_folder(folder, *, template: str | None = TEMPLATE, eos="<eos>", generation=None):
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|<\w+>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def chat(tmp_path):
    return ChatTokenizer(make_folder(tmp_path / "model", generation={"eos_token_id": [5, 1]}))


def encode(chat, prompt, name):
    return chat.encode_prompt(row(prompt), resolve_template({"name": name}))


def row(prompt):
    return Row(0, prompt, "1", "a.jsonl:7")


def ids(text_tokens):
    return [WORDS.index(word) for word in text_tokens]


def test_chat_and_none(chat):
    messages = [{"role": "user", "content": "1+2"}]
    as_chat = ids(["<user>", "1", "+", "2", "<bot>"])
    for prompt, name, expected in (
        ("1+2", "auto", as_chat),
        ("1+2", "chat", as_chat),
        (messages, "auto", as_chat),
        (messages, "chat", as_chat),
        ("1+2", "none", ids("1+2")),
        (messages, "none", ids("1+2")),
    ):
        found = encode(chat, prompt, name)
        assert found.tolist() == expected
        assert found.dtype == "int32"


def test_completion_ends_once(chat):
    assert chat.encode_completion("1+2").tolist() == [*ids("1+2"), 1]
    assert chat.encode_completion("1+2<eos>").tolist() == [*ids("1+2"), 1]


def test_decode(chat):
    tokens = [*ids(["\\boxed{", "1", "5", "}"])]
    assert chat.decode([*tokens, 1], skip_stop=True) == r"\boxed{15"
    assert chat.decode([*tokens, 1], skip_stop=False) == r"\boxed{15}<eos>"
    assert chat.token_text(4) == "\\boxed{"


def test_stop_tokens_are_those_of_both_files(chat, tmp_path):
    assert chat.stop_token_ids == (5, 1)
    assert (chat.eos_token_id, chat.pad_token_id, chat.vocab_size) == (1, 1, len(WORDS))
    alone = ChatTokenizer(make_folder(tmp_path / "alone", eos=None, generation={"eos_token_id": 5}))
    assert (alone.stop_token_ids, alone.eos_token_id) == ((5,), 5)
    with pytest.raises(DataError, match="names an end token"):
        ChatTokenizer(make_folder(tmp_path / "none", eos=None))


def test_without_a_template(tmp_path):
    chat = ChatTokenizer(make_folder(tmp_path / "base", template=None))
    assert encode(chat, "1+2", "auto").tolist() == ids("1+2")
    for prompt, name in (("1+2", "chat"), ([{"role": "user", "content": "1"}], "auto")):
        with pytest.raises(DataError, match=r"a\.jsonl:7: needs a chat template and .*base has none"):
            encode(chat, prompt, name)


def test_refusals(chat, tmp_path):
    with pytest.raises(DataError, match=r"a\.jsonl:7: has messages of user, user, and data\.template is none"):
        encode(chat, [{"role": "user", "content": "1"}] * 2, "none")
    strict = "{{ raise_exception('no system role') }}"
    refusing = ChatTokenizer(make_folder(tmp_path / "strict", template=strict))
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template refuses the messages \(no system role\)"):
        encode(refusing, "1", "chat")
    with pytest.raises(DataError, match="no such model folder"):
        ChatTokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no tokenizer that can be loaded"):
        ChatTokenizer(tmp_path / "empty")
