"""`moerl objective` on hand-made and dumped batches: the numbers are the API's, the errors say what to do."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import moerl
from moerl.__main__ import main
from moerl.algorithms.presets import PRESETS
from moerl.data.batch_file import read_batch
from moerl.data.dump import save_step_batch
from moerl.types import MicroBatch, StepBatch, TokenWeights

ROWS = [
    {
        "logprobs": [-0.05, -1.7, -1.0],
        "old_logprobs": [-0.1, -2.3, -0.7],
        "reward": 1,
        "group": "a",
        "tokens": [3, 4, 5],
    },
    {"logprobs": [-0.05, -3.5], "old_logprobs": [-0.5, -3.0], "reward": 0, "group": "a", "tokens": [6, 7]},
]


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"sequences": ROWS}))
    return str(path)


def json_of(capsys, *arguments):
    assert main(["objective", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_the_numbers_are_those_of_the_api(small, capsys):
    seen = json_of(capsys, "--preset", "clip_dapo", "--batch", small, "trust.hi=0.3")
    result = moerl.objective("clip_dapo", trust={"hi": 0.3}).evaluate(read_batch(small))
    assert seen["method"] == "clip_dapo"
    assert seen["loss"] == pytest.approx(result.loss.item(), rel=1e-12)
    assert seen["gradient_norm"] == pytest.approx(result.gradient.norm().item(), rel=1e-12)
    ratios = [math.exp(0.05), math.exp(0.6), math.exp(-0.3), math.exp(0.45), math.exp(-0.5)]
    assert seen["pg/ratio_max"] == pytest.approx(max(ratios))
    assert (seen["pg/clip_high"], seen["pg/clip_low"]) == (0.2, 0.2)  # e^0.6 for A > 0, e^-0.5 for A < 0
    assert seen["zero_gradient_fraction"] == 0.4


def test_side_by_side_names_the_tokens_that_tell_methods_apart(small, capsys):
    seen = json_of(capsys, "--compare", "clip_dapo,dapo_unclipped", "--batch", small, "--tokens", "5")
    assert seen["methods"]["clip_dapo"]["cosine"] == pytest.approx(1.0)
    assert seen["methods"]["dapo_unclipped"]["tokens_differ"] == 2
    assert [(t["sequence"], t["position"], t["token_id"]) for t in seen["tokens"]] == [(0, 1, 4), (1, 1, 7)]
    assert seen["tokens"][0]["gradients"]["clip_dapo"] == 0
    assert seen["tokens"][0]["log_ratio"] == pytest.approx(0.6)


def test_tables_for_people(small, capsys):
    assert main(["objective", "--preset", "clip_dapo", "--batch", small]) == 0
    assert "pg/clip_high" in capsys.readouterr().out
    assert main(["objective", "--compare", "gspo,cispo", "--batch", small]) == 0
    out = capsys.readouterr().out
    assert "where the gradients differ most" in out
    assert "cosine" in out
    assert main(["objective", "--list"]) == 0
    assert "gspo" in capsys.readouterr().out


def test_the_list_has_every_preset(capsys):
    rows = json_of(capsys, "--list")
    assert [row["name"] for row in rows] == list(PRESETS)
    grpo = next(row for row in rows if row["name"] == "grpo")
    assert grpo["needs"] == "old_logprobs, ref_logprobs"
    assert grpo["paper"] == "2402.03300"


def micro(rows, reward):
    tokens = 3
    ids = torch.arange(tokens)
    logprobs = -0.5 - ids / 10
    return MicroBatch(
        sample_ids=(rows,),
        token_ids=ids + 10 * rows,
        position_ids=ids,
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        seq_ids=torch.zeros(tokens, dtype=torch.int64),
        group_ids=torch.tensor([0]),
        rewards=torch.tensor([reward]),
        mask=ids > 0,
        rollout_logprobs=logprobs - 0.1,
        advantages=torch.full((tokens,), 5.0),
        temperature=torch.ones(tokens),
        weights=TokenWeights.shared(torch.ones(tokens)),
        old_logprobs=logprobs,
    )


@pytest.fixture
def dump(tmp_path):
    batch = StepBatch(((micro(0, 1.0),), (micro(1, 0.0),), (micro(1, 0.0),)), 2, 0, 2, 6, 4)
    return str(save_step_batch(tmp_path / "step.npz", batch))


def test_a_dump_of_the_loop(dump, capsys):
    whole = json_of(capsys, "--preset", "gspo", "--batch", dump)
    assert whole["tokens"] == 4  # two minibatches of the first epoch, prompt tokens masked
    assert whole["pg/ratio_mean"] == 1.0
    assert whole["gradient_norm"] == pytest.approx(math.sqrt(4 * 0.25**2), rel=1e-5)
    kept = json_of(capsys, "--preset", "gspo", "--batch", dump, "--keep-advantages", "--minibatch", "1")
    assert kept["gradient_norm"] == pytest.approx(math.sqrt(2 * 2.5**2), rel=1e-5)
    moved = json_of(capsys, "--preset", "cispo", "--batch", dump, "--move", "0.3", "--seed", "1")
    assert moved["pg/ratio_max"] != 1.0
    assert moved == json_of(capsys, "--preset", "cispo", "--batch", dump, "--move", "0.3", "--seed", "1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[0].pop("logprobs"), "sequences[0] has no list of logprobs"),
        (lambda rows: rows[1].pop("reward"), "sequences[1] and sequences[0] differ in reward"),
        (lambda rows: rows[1].update(rewrad=1), "unknown key 'rewrad'"),
        (lambda rows: rows[1].update(old_logprobs=[1.0]), "sequences[1].old_logprobs has 1 entries; give a list of 2"),
        (lambda rows: rows[1].update(old_logprobs=-1.0), "sequences[1].old_logprobs is -1.0; give a list of 2"),
        (lambda rows: rows[0].update(logprobs=-1.0), "sequences[0] has no list of logprobs"),
        (lambda rows: rows[1].update(group=["a"]), "sequences[1].group is ['a']; give a whole number or a text"),
        (lambda rows: rows[1].update(reward="high"), "reward must be numbers"),
        (lambda rows: rows.clear(), 'must hold {"sequences": [...]}'),
    ],
)
def test_json_that_is_wrong(tmp_path, capsys, change, message):
    rows = json.loads(json.dumps(ROWS))
    change(rows)
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"sequences": rows}))
    assert main(["objective", "--preset", "gspo", "--batch", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "gspo"], "--batch is missing"),
        (["--preset", "gspo", "--batch", "no.json"], "no.json: is not readable JSON"),
        (["--preset", "gspo", "--batch", "x.bin"], "give --format"),
        (["--preset", "gspo", "--batch", "1.jsonl"], "carry no log-probabilities"),
        (["--preset", "gspo", "--batch", "x.npz", "--format", "parquet"], "format 'parquet' is unknown"),
        (["--compare", "gspo,gspo", "--batch", "x.json"], "give different presets"),
        (["--preset", "gpso", "--batch", "x.json"], "did you mean 'gspo'"),
        (["--preset", "gspo", "--batch", "x.json", "--move", "-1"], "--move is -1.0"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert main(["objective", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_table_for_a_pipe_has_one_line_for_each_preset(capsys):
    assert main(["objective", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "reinforce_pp_baseline" in line]
    assert "REINFORCE++ with the group's mean as baseline and a k2 KL in the loss" in line
    assert "old_logprobs, ref_logprobs" in line


def test_what_a_method_lacks_names_the_method_and_the_way_without(small, capsys):
    assert main(["objective", "--compare", "gspo,grpo", "--batch", small]) == 2
    error = capsys.readouterr().err
    assert (
        "grpo: the method reads ref_logprobs, which was not given; give it per token, like logprobs, or set " in error
    )
    assert "kl.place to none" in error
    assert main(["objective", "--compare", "gspo,grpo", "--batch", small, "kl.place=none"]) == 0


def test_wrong_shapes_name_the_file(dump, capsys):
    with np.load(dump) as archive:
        arrays = {name: archive[name] for name in archive.files}
    np.savez(dump, **{**arrays, "m0.0.rollout_logprobs": arrays["m0.0.rollout_logprobs"][:-1]})
    assert main(["objective", "--preset", "gspo", "--batch", dump]) == 2
    error = capsys.readouterr().err
    assert f"{dump}: " in error
    assert "rollout_logprobs has shape" in error


def test_a_minibatch_that_is_not_there(dump, capsys):
    assert main(["objective", "--preset", "gspo", "--batch", dump, "--minibatch", "7"]) == 2
    assert "minibatches 0 to 2; 7 is none of them" in capsys.readouterr().err
