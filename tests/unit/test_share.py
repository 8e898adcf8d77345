"""SampleShare: what each rank holds after it, and that what it holds is what the leader had."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moerl.errors import DataError
from moerl.share import SampleShare, _from_bytes, _narrow, _to_bytes, trained_on
from moerl.types import LocalArray, PackPlan, Sample, Support, TopLogprobs
from moerl.world import Alone


class Line:
    """Two ends of a team of three: what the leader sends is kept, and a follower of one data rank takes it."""

    size = 3

    def __init__(self, data_rank=None):
        self.is_leader = data_rank is None
        self.data_rank = data_rank
        self.sent = []

    def phase(self, name):
        assert name == "share"

    def spread(self, data):
        if self.is_leader:
            self.sent.append(data)
            return data
        return self.sent.pop(0)

    def deliver(self, part_of):
        if self.is_leader:
            self.sent.append([part_of(rank) for rank in range(2)])
            return b""
        return self.sent.pop(0)[self.data_rank]


def samples(num_experts=8):
    rng = np.random.default_rng(0)
    made = []
    for i, length in enumerate((5, 3, 9)):
        steps = np.arange(length)
        offsets = np.concatenate(([0], np.cumsum(rng.integers(0, 3, length))))
        dtype = np.uint8 if num_experts <= 256 else np.int16
        made.append(
            Sample(
                sample_id=i,
                group_id=i // 2,
                prompt_id=f"sums/{i}",
                token_ids=rng.integers(0, 50, length).astype(np.int32),
                loss_mask=steps >= 2,
                rollout_logprobs=rng.normal(size=length).astype(np.float32),
                advantages=rng.normal(size=length).astype(np.float32),
                reward=0.1 + i / 3,
                temperature=0.7,
                routed_experts=LocalArray(rng.integers(0, num_experts, (length, 2, 3)).astype(dtype)) if i else None,
                has_route=steps < length - 1 if i else None,
                support=Support(np.arange(offsets[-1], dtype=np.int32), offsets) if i == 1 else None,
                top_logprobs=TopLogprobs(np.full((length, 2), -1, np.int32), np.zeros((length, 2), np.float32))
                if i == 2
                else None,
                components=np.array([0.25, np.nan]) if i != 1 else None,
                shaping=-1 / 7,
                response_length=length - 2,
            )
        )
    return made


def same(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_same_scalars(a, b):
    for name in ("sample_id", "group_id", "prompt_id", "reward", "temperature", "shaping", "response_length"):
        assert getattr(a, name) == getattr(b, name), name
    same(a.loss_mask, b.loss_mask)
    same(a.components, b.components)


def through(leader, data_rank, wanted):
    """Every rank's view after an outline and a delivery."""
    head, tail = Line(), Line(data_rank)
    tail.sent = head.sent
    here, there = SampleShare(head), SampleShare(tail)
    assert here.outline(leader) == leader
    outlines = there.outline([])
    here.deliver(leader, wanted)
    return outlines, there.deliver(outlines, wanted)


@pytest.mark.parametrize("num_experts", [8, 300])
def test_a_rank_gets_the_arrays_of_what_it_trains_on_and_only_the_shape_of_the_rest(num_experts):
    leader = samples(num_experts)
    outlines, got = through(leader, 1, [{0}, {1, 2}])
    for mine, outline, theirs in zip(leader, outlines, got, strict=True):
        assert_same_scalars(mine, outline)
        assert_same_scalars(mine, theirs)
        assert outline.token_ids.nbytes == 4 * len(mine.token_ids)
        assert outline.token_ids.strides == (0,)
        assert outline.routed_experts is None
        if mine.sample_id == 0:
            assert theirs.token_ids.strides == (0,)
            continue
        for name in ("token_ids", "rollout_logprobs", "advantages", "has_route"):
            same(getattr(mine, name), getattr(theirs, name))
        same(mine.routed_experts.open(), theirs.routed_experts.open())
        assert theirs.routed_experts.open().itemsize == (1 if num_experts <= 256 else 2)
    same(leader[1].support.ids, got[1].support.ids)
    same(leader[1].support.offsets, got[1].support.offsets)
    same(leader[2].top_logprobs.ids, got[2].top_logprobs.ids)
    same(leader[2].top_logprobs.logprobs, got[2].top_logprobs.logprobs)


def test_a_step_without_samples_is_shared_too():
    outlines, got = through([], 0, [set(), set()])
    assert outlines == got == []


def test_one_process_copies_nothing():
    leader = samples()
    share = SampleShare(Alone())
    assert all(a is b for a, b in zip(leader, share.outline(leader), strict=True))
    assert all(a is b for a, b in zip(leader, share.deliver(leader, [{0, 1, 2}]), strict=True))


def test_who_trains_on_what_is_read_over_all_minibatches():
    plan = PackPlan(((((0, 1),), ((2,),)), (((3,),), ((4, 5),)), (((2,),), ((0,),))))
    assert trained_on(plan) == [{0, 1, 2, 3}, {0, 2, 4, 5}]


def test_wide_integers_are_narrowed_where_they_fit():
    assert _narrow(np.array([[0, 255]])).dtype == np.uint8
    assert _narrow(np.array([[0, 256]])).dtype == np.int16


def test_bytes_that_are_not_what_their_list_says_are_refused():
    data = _to_bytes({}, [np.arange(3)])
    with pytest.raises(DataError, match="bytes of samples where its list has"):
        _from_bytes(data + b"x")
    text = json.dumps({"arrays": [["object", [1]]]}).encode()
    with pytest.raises(DataError, match="'object'"):
        _from_bytes(len(text).to_bytes(8, "little") + text + b"12345678")
