"""Tokenised sets, mixtures that resume, and disjoint held-out prompts."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config.schema import DatasetConfig
from moerl.data.prompts import PromptMixture, PromptSet, check_disjoint, fingerprint_of, load_dataset
from moerl.errors import ConfigError, DataError
from moerl.metrics import to_floats
from moerl.types import Prompt


class ByteTokenizer:
    """One token a byte; keeps the protocol of `ChatTokenizer`."""

    def encode_prompt(self, row, template):
        return np.frombuffer(row.text.encode(), np.uint8).astype(np.int32)

    def encode_completion(self, text):
        return np.frombuffer(text.encode() + b"\0", np.uint8).astype(np.int32)


def load(path, *, name="a", limit=None, max_prompt_tokens=100, **options):
    config = DatasetConfig(name=name, source={"name": "file", "path": str(path)}, limit=limit)
    return load_dataset(config, ByteTokenizer(), max_prompt_tokens=max_prompt_tokens, **options)


def write(path, *prompts, **columns):
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": "1", **columns}) for p in prompts))
    return path


def make_set(name, size, weight=1.0, salt=""):
    prompts = tuple(
        Prompt(f"{name}/{i}", np.array([i], np.int32), f"{i}{salt}", name, metadata={"text": f"{name} {i}"})
        for i in range(size)
    )
    return PromptSet(name, prompts, weight, 0, fingerprint_of(prompts))


def ids(prompts):
    return [p.prompt_id for p in prompts]


def test_prompts_of_a_file(tmp_path):
    path = write(tmp_path / "a.jsonl", "1+1=", "2+2=", source="book", completion="2")
    loaded = load(path)
    assert ids(loaded.prompts) == ["a/0", "a/1"]
    prompt = loaded.prompts[1]
    assert prompt.token_ids.tolist() == list(b"2+2=")
    assert prompt.completion_ids is not None
    assert prompt.completion_ids.tolist() == [*b"2", 0]
    assert dict(prompt.metadata) == {"text": "2+2=", "source": f"{path}:2", "file_source": "book"}
    assert ids(load(path, limit=1).prompts) == ["a/0"]


def test_long_prompts_are_skipped_and_counted_or_refused(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", "short", "far too long", "tiny")
    loaded = load(path, max_prompt_tokens=5)
    assert (ids(loaded.prompts), loaded.num_skipped) == (["a/0", "a/2"], 1)
    assert f"1 of 3 prompts are longer than data.max_prompt_tokens=5 and left out, the first is {path}:2" in caplog.text
    assert to_floats(PromptMixture([loaded], seed=0).metrics())["data/skipped_long_prompts"] == 1.0
    for options in ({"max_prompt_tokens": 5, "on_long_prompt": "refuse"}, {"max_prompt_tokens": 3}):
        with pytest.raises(DataError) as caught:
            load(path, **options)
        assert f"longer than data.max_prompt_tokens={options['max_prompt_tokens']}" in str(caught.value)
        assert f"{path}:2: 12 tokens" in str(caught.value)


def test_bad_options(tmp_path):
    path = write(tmp_path / "a.jsonl", "p")
    with pytest.raises(ConfigError, match="allowed: skip, refuse"):
        load(path, on_long_prompt="drop")
    with pytest.raises(ConfigError, match="limit must be at least 1"):
        load(path, limit=0)
    with pytest.raises(ConfigError, match=r"data set 'a': source \(file\): unknown key 'pth'; did you mean 'path'"):
        load_dataset(DatasetConfig("a", {"name": "file", "pth": "x"}), ByteTokenizer(), max_prompt_tokens=5)
    with pytest.raises(ConfigError, match="names no data set"):
        PromptMixture([], seed=0)
    with pytest.raises(ConfigError, match="two data sets are called 'a'"):
        PromptMixture([make_set("a", 2), make_set("a", 3)], seed=0)
    with pytest.raises(ConfigError, match="weight must be a positive number, is 0"):
        PromptMixture([make_set("a", 2, weight=0)], seed=0)


def test_every_epoch_is_a_whole_pass_in_an_order_of_its_own():
    mixture = PromptMixture([make_set("a", 20)], seed=7)
    epochs = [ids(mixture.next_prompts(20)) for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 20 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids(PromptMixture([make_set("a", 20)], seed=7).next_prompts(20)) == epochs[0]
    assert ids(PromptMixture([make_set("a", 20)], seed=8).next_prompts(20)) != epochs[0]


def test_order_of_a_set_does_not_depend_on_the_others_or_on_batch_sizes():
    alone = ids(PromptMixture([make_set("a", 9)], seed=1).next_prompts(18))
    mixed = PromptMixture([make_set("b", 5, weight=3.0), make_set("a", 9)], seed=1)
    drawn = [p for size in (1, 7, 2, 30, 40) for p in ids(mixed.next_prompts(size))]
    assert [p for p in drawn if p.startswith("a/")][:18] == alone


def test_order_is_the_same_in_every_version():
    """A checkpoint must resume under another numpy, so the permutation is pinned."""
    drawn = ids(PromptMixture([make_set("a", 8)], seed=0).next_prompts(8))
    assert drawn == [f"a/{i}" for i in (3, 4, 6, 7, 1, 2, 5, 0)]


def test_unshuffled_is_the_order_of_the_file():
    mixture = PromptMixture([make_set("a", 3)], seed=0, shuffle=False)
    assert ids(mixture.next_prompts(5)) == ["a/0", "a/1", "a/2", "a/0", "a/1"]


def test_shares_hold_at_every_moment():
    sets = [make_set("a", 10, weight=1.0), make_set("b", 10, weight=2.0), make_set("c", 10, weight=0.5)]
    mixture = PromptMixture(sets, seed=0)
    counts: Counter[str] = Counter()
    for draw in range(1, 351):
        counts[mixture.next_prompts(1)[0].dataset] += 1
        for one in sets:
            assert abs(counts[one.name] - draw * one.weight / 3.5) < 1.0
    assert dict(counts) == {"a": 100, "b": 200, "c": 50}


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    before=st.lists(st.integers(0, 15), max_size=4),
    after=st.integers(1, 30),
    shuffle=st.booleans(),
)
def test_resumed_equals_uninterrupted(sizes, before, after, shuffle):
    """verl#5725, SkyRL#589, open-instruct#1523: at and across epoch borders the next prompts are those due."""
    sets = [make_set(f"s{i}", size, weight=1.0 + i) for i, size in enumerate(sizes)]
    whole = PromptMixture(sets, seed=3, shuffle=shuffle)
    for count in before:
        whole.next_prompts(count)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptMixture(sets, seed=3, shuffle=shuffle)
    resumed.next_prompts(2)
    resumed.load_state_dict(state)
    assert ids(resumed.next_prompts(after)) == ids(whole.next_prompts(after))
    assert to_floats(resumed.metrics()) == to_floats(whole.metrics())


def test_saved_exactly_at_the_end_of_an_epoch_goes_on_into_the_next():
    """verl#5725, SkyRL#589: 64 prompts, saved at the end of epoch 1."""
    first = PromptMixture([make_set("a", 64)], seed=0)
    epoch_one = ids(first.next_prompts(64))
    second = PromptMixture([make_set("a", 64)], seed=0)
    second.load_state_dict(first.state_dict())
    assert to_floats(second.metrics())["data/epoch"] == 1.0
    epoch_two = ids(second.next_prompts(64))
    assert sorted(epoch_two) == sorted(epoch_one)
    assert epoch_two != epoch_one


@pytest.mark.parametrize(
    ("other", "seed", "shuffle", "message"),
    [
        (
            [make_set("a", 5, salt="x")],
            0,
            True,
            r"data set 'a' has changed since the checkpoint: 5 prompts, fingerprint",
        ),
        ([make_set("a", 6)], 0, True, r"fingerprint \w+, and now 6,"),
        ([make_set("b", 5)], 0, True, r"drew from data sets \['a'\] and the run has \['b'\]"),
        ([make_set("a", 5, weight=2.0)], 0, True, r"had weight 1.0 in the checkpoint and has 2.0 now"),
        ([make_set("a", 5)], 1, True, r"saved with seed=0 and is now seed=1"),
        ([make_set("a", 5)], 0, False, r"saved with shuffle=True and is now shuffle=False"),
    ],
)
def test_cursor_of_other_data_is_refused(other, seed, shuffle, message):
    state = PromptMixture([make_set("a", 5)], seed=0).state_dict()
    with pytest.raises(DataError, match=message):
        PromptMixture(other, seed=seed, shuffle=shuffle).load_state_dict(state)


def test_held_out_prompts_must_not_be_training_prompts(tmp_path):
    train = load(write(tmp_path / "train.jsonl", "What is 1+1?", "What is 2+2?"), name="train")
    check_disjoint([train], [load(write(tmp_path / "held.jsonl", "What is 3+3?"), name="held")])
    for twin in ("What is 2+2?", "what  is 2+2? ", "What is 2+2\uff1f"):
        held = load(write(tmp_path / "held.jsonl", "What is 3+3?", twin), name="held")
        with pytest.raises(DataError) as caught:
            check_disjoint([train], [held])
        assert "1 held-out prompts are also training prompts" in str(caught.value)
        assert f"{tmp_path / 'held.jsonl'}:2 is also {tmp_path / 'train.jsonl'}:2" in str(caught.value)
