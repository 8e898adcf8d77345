"""Dumps of slime and verl in their own layouts, made by hand: what is read, and what is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch

import moerl
from moerl.data.foreign.slime import read_slime
from moerl.data.foreign.verl import read_verl, read_verl_generations
from moerl.errors import DataError


def slime_sample(**changed):
    """`Sample.to_dict()` of slime."""
    sample = {
        "group_index": 4,
        "index": 32,
        "prompt": "1+1=",
        "tokens": [5, 6, 7, 8, 9],
        "multimodal_inputs": None,
        "response": " 2.",
        "response_length": 3,
        "label": "2",
        "reward": 1.0,
        "loss_mask": [1, 0, 1],
        "weight_versions": ["0"],
        "rollout_log_probs": [-0.5, -0.25, -1.0],
        "rollout_routed_experts": np.zeros((4, 2, 2), dtype=np.int32),
        "remove_sample": False,
        "status": "completed",
        "metadata": {"round_number": 1},
        "spec_info": {"spec_accept_token_num": 0},
    }
    return sample | changed


def save(path, content):
    torch.save(content, path)
    return path


def test_slime_rollouts(tmp_path):
    other = slime_sample(
        tokens=[5, 6, 1, 2], response_length=2, loss_mask=None, rollout_log_probs=[-2.0, -3.0], reward=0.0
    )
    dropped = slime_sample(status="aborted", rollout_log_probs=None)
    removed = slime_sample(group_index=9, remove_sample=True)
    path = save(tmp_path / "0.pt", {"rollout_id": 0, "samples": [slime_sample(), other, dropped, removed]})
    batch = read_slime(path)
    assert batch.num_seqs == 3
    assert batch.logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0, -0.5, -0.25, -1.0]
    assert batch.mask.tolist() == [True, False, True, True, True, False, False, False]
    assert batch.columns["token_ids"].tolist() == [7, 8, 9, 1, 2, 7, 8, 9]
    assert batch.rewards.flatten().tolist() == [1.0, 0.0, 1.0]
    assert batch.group_ids.tolist() == [4, 4, 9]
    result = moerl.objective("gspo").evaluate(batch)
    assert result.gradient.tolist()[1] == 0
    torch.testing.assert_close(
        result.gradient[0], torch.tensor(-0.25), rtol=1e-5, atol=0
    )  # A 1, 1/2 sequences, 1/2 tokens


def test_slime_train_data(tmp_path):
    data = {
        "tokens": [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9])],
        "response_lengths": [2, 1],
        "total_lengths": [4, 3],
        "loss_masks": [torch.tensor([1, 1]), torch.tensor([1])],
        "log_probs": [torch.tensor([-0.5, -0.25]), torch.tensor([-1.0])],
        "ref_log_probs": [torch.tensor([-0.6, -0.25]), torch.tensor([-1.5])],
        "rollout_log_probs": [torch.tensor([-0.4, -0.3]), torch.tensor([-1.25])],
        "raw_reward": [1.0, 0.0],
        "rewards": [0.7, -0.7],
        "advantages": [torch.tensor([2.0, 2.0]), torch.tensor([-2.0])],
        "sample_indices": [16, 17],
    }
    path = save(tmp_path / "0_0.pt", {"rollout_id": 0, "rank": 0, "rollout_data": data})
    batch = read_slime(path, group_size=8)
    assert batch.columns["old_logprobs"].tolist() == [-0.5, -0.25, -1.0]
    assert batch.columns["rollout_logprobs"].tolist() == pytest.approx([-0.4, -0.3, -1.25])
    assert batch.columns["ref_logprobs"].tolist() == pytest.approx([-0.6, -0.25, -1.5])
    assert batch.rewards.flatten().tolist() == [1.0, 0.0]
    assert batch.group_ids.tolist() == [2, 2]
    assert batch.advantages is None
    assert read_slime(path, group_size=8, keep_advantages=True).advantages.tolist() == [2.0, 2.0, -2.0]
    with pytest.raises(DataError, match="give group_size"):
        read_slime(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rollout_log_probs": None}, r"samples\[0\] has no rollout_log_probs"),
        ({"rollout_log_probs": [-1.0]}, "has 1 entries, but the response has 3 tokens"),
        ({"loss_mask": [1]}, r"loss_mask has 1 entries"),
        ({"tokens": [1]}, "fewer than response_length"),
        ({"reward": {"format": 1.0, "answer": 0.0}}, "keys format, answer; give reward_key"),
        ({"reward": "good"}, r"samples\[0\].reward is 'good', but must be a number"),
        ({"rollout_log_probs": ["a", "b", "c"]}, r"samples\[0\].rollout_log_probs must hold numbers, one a token"),
        ({"group_index": None}, "give group_size"),
        ({"status": "aborted"}, "none of its 1 samples is complete"),
    ],
)
def test_slime_samples_that_lack_something(tmp_path, changed, message):
    path = save(tmp_path / "0.pt", {"rollout_id": 0, "samples": [slime_sample(**changed)]})
    with pytest.raises(DataError, match=message):
        read_slime(path)


def test_slime_rewards_by_key(tmp_path):
    path = save(tmp_path / "0.pt", {"rollout_id": 0, "samples": [slime_sample(reward={"a": 0.0, "b": 3.0})]})
    assert read_slime(path, reward_key="b").rewards.tolist() == [[3.0]]


def test_other_content_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds other, but slime's dumps hold 'samples' or 'rollout_data'"):
        read_slime(save(tmp_path / "a.pt", {"other": 1}))
    with pytest.raises(DataError, match="no such file"):
        read_slime(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_bytes(b"PK\x03\x04 not whole")
    with pytest.raises(DataError, match="is not a whole"):
        read_slime(tmp_path / "text.pt")
    (tmp_path / "text.pt").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"is not a whole torch.save file \(it is of another kind\)"):
        read_slime(tmp_path / "text.pt")
    with pytest.raises(DataError, match=r"samples\[0\] is 7, but must be the mapping"):
        read_slime(save(tmp_path / "a.pt", {"samples": [7]}))


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("reader", [read_slime, read_verl])
def test_nothing_in_a_file_is_run(tmp_path, reader):
    trace = tmp_path / "was-run"
    in_torch = save(tmp_path / "trap.pt", {"samples": [slime_sample(metadata={"x": Trap(trace)})]})
    plain = tmp_path / "trap.pkl"
    plain.write_bytes(pickle.dumps(Trap(trace)))
    for path in (in_torch, plain):
        with pytest.raises(DataError, match="could run code when they are read"):
            reader(path)
    assert not trace.exists()


def verl_tensors():
    """`DataProto.batch` of verl after the advantage step: prompts of 2, responses of 3."""
    return {
        "prompts": torch.tensor([[1, 2], [1, 2]]),
        "responses": torch.tensor([[7, 8, 9], [7, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "old_log_probs": torch.tensor([[-0.5, -0.25, -1.0], [-2.0, 99.0, float("nan")]]),
        "rollout_log_probs": torch.tensor([[-0.4, -0.25, -1.0], [-2.0, 0.0, 0.0]]),
        "ref_log_prob": torch.tensor([[-0.5, -0.5, -1.0], [-2.0, 0.0, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.25, 0.0, 0.0]]),
        "advantages": torch.tensor([[1.5, 1.5, 1.5], [-1.5, 0.0, 0.0]]),
    }


def check_verl(batch):
    assert batch.seq_ids.tolist() == [0, 0, 0, 1]
    assert batch.logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert batch.rewards.flatten().tolist() == [1.0, 0.25]
    assert batch.columns["token_ids"].tolist() == [7, 8, 9, 7]
    assert batch.columns["ref_logprobs"].tolist() == [-0.5, -0.5, -1.0, -2.0]
    assert batch.group_ids.tolist() == [0, 0]


def test_verl_tensors(tmp_path):
    path = save(tmp_path / "b.pt", {**verl_tensors(), "uid": ["u1", "u1"]})
    check_verl(read_verl(path))
    assert read_verl(path, keep_advantages=True).advantages.tolist() == [1.5, 1.5, 1.5, -1.5]
    without = {key: value for key, value in verl_tensors().items() if key != "response_mask"}
    check_verl(read_verl(save(tmp_path / "c.pt", without), group_size=2))
    gradient = moerl.objective("dr_grpo", max_new_tokens=3).evaluate(read_verl(path)).gradient
    torch.testing.assert_close(gradient, torch.tensor([[-1, -1, -1], [1, 0, 0]]) * 0.375 / 6)


def test_verl_tensordict_folder(tmp_path):
    about = {"shape": [2], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    for name, tensor in verl_tensors().items():
        (tmp_path / f"{name}.memmap").write_bytes(tensor.numpy().tobytes())
        about[name] = {"device": "cpu", "shape": list(tensor.shape), "dtype": str(tensor.dtype), "is_nested": False}
    (tmp_path / "meta.json").write_text(json.dumps(about))
    check_verl(read_verl(tmp_path, group_size=2))
    (tmp_path / "responses.memmap").write_bytes(b"12")
    with pytest.raises(DataError, match="shorter than the 48 bytes"):
        read_verl(tmp_path, group_size=2)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(DataError, match="no readable meta"):
        read_verl(tmp_path)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["old_log_probs", "rollout_log_probs"], "neither old_log_probs nor rollout_log_probs"),
        (["response_mask", "attention_mask"], "the padding cannot be told"),
        (["token_level_scores"], "there is no reward"),
        ([], "give group_size"),
    ],
)
def test_verl_batches_that_lack_something(tmp_path, missing, message):
    tensors = {key: value for key, value in verl_tensors().items() if key not in missing}
    with pytest.raises(DataError, match=message):
        read_verl(save(tmp_path / "b.pt", tensors), group_size=2 if missing else None)


def test_verl_generations(tmp_path):
    rows = [
        {"input": "1+1", "output": "2", "gts": "2", "score": 1.0, "step": 3, "acc": True},
        {"input": "2+2", "output": "5", "gts": "4", "score": 0.0, "step": 3, "acc": False},
        {"input": "1+1", "output": "3", "gts": "2", "score": 0.0, "step": 3, "acc": False},
    ]
    path = tmp_path / "3.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    read = read_verl_generations(path)
    assert read.scores.tolist() == [1.0, 0.0, 0.0]
    assert read.group_ids.tolist() == [0, 1, 0]
    assert (read.step, read.outputs, read.extras[0]) == (3, ("2", "5", "3"), {"gts": "2", "acc": True})
    values, _ = moerl.objective("dr_grpo", max_new_tokens=1).advantages(read.scores, read.group_ids)
    assert values.tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "x.jsonl:1: not JSON"), ('\n{"input": "a", "output": "b"}', "x.jsonl:2: has no 'score'"), ("", "no lines")],
)
def test_generations_that_are_wrong(tmp_path, text, message):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_verl_generations(tmp_path / "x.jsonl")
