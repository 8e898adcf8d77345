"""`verify` sees every bit and what the models say; `inspect` sees damage; the command says what to do."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversions import save_run
from quantised_folders import read_files, save_fp8, write_files
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, make_model, save_model

from moerl.__main__ import main
from moerl.commands.convert import add_arguments, num_bytes
from moerl.convert.compare import Forward, Said, compare_forwards, compare_weights, largest_gap
from moerl.convert.exports import export_checkpoint
from moerl.convert.imports import Options, import_checkpoint
from moerl.convert.layouts import Layout
from moerl.convert.places import find
from moerl.errors import CheckpointError, ConfigError
from moerl.models.family import UNSUPPORTED, families

NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_model(tmp_path / "hf", "softmax")


@pytest.fixture
def shards(folder, tmp_path) -> Path:
    import_checkpoint(find(folder), tmp_path / "shards", Layout(expert=2), Options())
    return tmp_path / "shards"


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def found(first: Path, second: Path) -> list[tuple[str, str]]:
    verdict = compare_weights(find(first), find(second))
    return [(difference.name, difference.what) for difference in verdict.differences]


def test_one_bit_is_seen(folder, shards):
    assert found(folder, shards) == []
    edit(folder, lambda t: t[NAME].view(torch.int32).view(-1).__getitem__(slice(5, 6)).bitwise_xor_(1))
    ((name, what),) = found(folder, shards)
    assert name == NAME
    assert what.startswith("1 of 960 values differ, by up to ")


def test_the_sign_of_zero_is_a_bit_and_a_nan_is_itself(folder, tmp_path):
    edit(folder, lambda t: t[NAME].view(-1).__setitem__(slice(0, 2), torch.tensor([0.0, torch.nan])))
    import_checkpoint(find(folder), tmp_path / "shards", Layout(), Options())
    assert found(folder, tmp_path / "shards") == []
    edit(folder, lambda t: t[NAME].view(-1).__setitem__(0, -0.0))
    assert found(folder, tmp_path / "shards") == [(NAME, "equal values, other bits (zeros or NaNs)")]


def test_another_type_says_whether_the_values_are_the_same(folder, tmp_path):
    export_checkpoint(find(folder), tmp_path / "half", Options(dtype=torch.bfloat16))
    export_checkpoint(find(tmp_path / "half"), tmp_path / "wide", Options(dtype=torch.float32))
    differing = dict(found(folder, tmp_path / "half"))
    assert differing[NAME].startswith("float32 and bfloat16: ")
    assert "values differ" in differing[NAME]
    assert dict(found(tmp_path / "half", tmp_path / "wide"))[NAME] == "bfloat16 and float32: equal values"


def test_another_network_is_told_by_its_settings_and_tensors(folder, tmp_path):
    other = save_model(tmp_path / "other", "dense_first")
    names = [name for name, _ in found(folder, other)]
    assert names[0] == "config.json: moe_layer_freq"
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names


def test_both_say_the_same_of_random_tokens(folder, shards):
    forward = compare_forwards(find(folder), find(shards), num_tokens=40, seed=1)
    assert forward.by == ("transformers", "megatron")
    assert forward.gap.size <= 1e-5
    assert forward.differences(1e-5) == []
    assert (forward.routes_differing, forward.num_routes) == (0, 40 * 4 * 3)
    assert forward.num_logits == 40 * 54
    again = compare_forwards(find(folder), find(folder), num_tokens=40, seed=1)
    assert again.by == ("transformers", "megatron")
    assert again.gap == forward.gap


def test_a_wrong_mapping_shows_in_the_forward(folder, tmp_path):
    def swap(tensors):
        gate, up = "model.layers.1.mlp.experts.2.gate_proj.weight", NAME
        tensors[gate], tensors[up] = tensors[up], tensors[gate]

    other = save_model(tmp_path / "other", "softmax")
    edit(other, swap)
    assert {name for name, _ in found(folder, other)} == {NAME, NAME.replace("up_proj", "gate_proj")}
    assert compare_forwards(find(folder), find(other), num_tokens=64, seed=0).gap.size > 1e-4


def test_rows_of_the_head_that_changed_places_show_in_the_forward(folder, tmp_path, capsys):
    """A softmax over all of them is the same, and so is what it says of every other token."""

    def swap(tensors):
        tensors["lm_head.weight"][[11, 47]] = tensors["lm_head.weight"][[47, 11]]

    other = save_model(tmp_path / "other", "softmax")
    edit(other, swap)
    forward = compare_forwards(find(folder), find(other), num_tokens=8, seed=0)
    assert forward.gap.token in (11, 47)
    assert forward.gap.size > 0.05
    assert (forward.routes_differing, forward.first_route) == (0, None)
    ((name, what),) = [(one.name, one.what) for one in forward.differences(1e-5)]
    assert name == f"logit of token {forward.gap.token} after position {forward.gap.position}"
    assert what.startswith(f"{forward.gap.logits[0]:.6g} and {forward.gap.logits[1]:.6g}, ")
    assert main(["convert", "verify", str(folder), str(other), "--tokens", "8", "--no-forward"]) == 1
    assert "logit of token" not in capsys.readouterr().out
    assert main(["convert", "verify", str(folder), str(other), "--tokens", "8"]) == 1
    told = capsys.readouterr().out
    assert f"{name} " in told
    assert f"those of token {forward.gap.token} after position {forward.gap.position}: {what}, allowed 3e-05" in told


def test_routes_that_differ_are_told_with_the_first_of_them(folder, tmp_path):
    other = save_model(tmp_path / "other", "softmax")
    edit(other, lambda t: t["model.layers.2.mlp.gate.weight"].neg_())
    forward = compare_forwards(find(folder), find(other), num_tokens=8, seed=0)
    assert forward.routes_differing > 0
    assert forward.first_route == (0, 2)
    name, what = forward.differences(1.0)[-1].name, forward.differences(1.0)[-1].what
    assert (name, what.endswith("differ, the first at position 0 in MoE layer 2")) == ("routes", True)


def test_models_that_choose_other_numbers_of_experts_are_told_by_their_choices(folder, tmp_path, capsys):
    """All tensors are the same, or another layer has experts."""
    narrow = save_model(tmp_path / "narrow", "softmax")
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 2}))
    assert main(["convert", "verify", str(folder), str(narrow), "--tokens", "8"]) == 1
    told = capsys.readouterr().out
    assert "config.json: moe_router_topk" in told
    assert "3 experts in each of 4 MoE layers and 2 experts in each of 4 MoE layers" in told
    other = save_model(tmp_path / "other", "dense_first")
    forward = compare_forwards(find(folder), find(other), num_tokens=8, seed=0)
    assert (forward.num_routes, forward.routes_differing) == (0, 0)
    assert [one.what for one in forward.differences(math.inf)] == [" and ".join(forward.choices)]
    assert forward.choices[0] != forward.choices[1]


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("place", [(0, 0), (4, 6), (9, 1)])
def test_the_largest_gap_is_found_wherever_it_is_in_bounded_memory(rows, place):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(10, 5, generator=generator), torch.randn(7, 5, generator=generator)
    asked = []

    def head(given):
        asked.append(len(given))
        return given @ weight.t()

    apart = torch.zeros(10, 7)
    apart[place], apart[5, 5] = -2.0, 1.0
    starts = iter(range(0, 10, rows))

    def other(given):
        start = next(starts)
        return given @ weight.t() + apart[start : start + len(given)]

    gap = largest_gap(Said(hidden, head, None), Said(hidden, other, None), max_logits=7 * rows + 6)
    logits = hidden @ weight.t()
    assert max(asked) == min(rows, 10)
    scaled = apart.abs() / (1 + logits.abs().amax(1, keepdim=True))
    assert (gap.position, gap.token) == divmod(int(scaled.argmax()), 7)
    assert gap.size == pytest.approx(float(scaled.max()), rel=1e-5)
    assert gap.logits == pytest.approx(
        (float(logits[gap.position, gap.token]), float((logits + apart)[gap.position, gap.token]))
    )


def test_a_logit_that_is_no_number_is_the_largest_gap():
    hidden, logits = torch.zeros(2, 3), torch.tensor([[0.0, 1, 2, 3], [4, 5, 6, 7]])
    broken = logits.clone()
    broken[0, 1], broken[1, 2] = 100, torch.nan
    gap = largest_gap(Said(hidden, lambda rows: logits[: len(rows)], None), Said(hidden, lambda _: broken, None))
    assert (math.isnan(gap.size), gap.position, gap.token) == (True, 1, 2)
    assert len(Forward(gap, 8, 0, 0, None, ("a", "b"), ("", "")).differences(1e9)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_model_is_its_backbone_and_its_head(kind):
    """Which `verify` takes apart, so that not all logits exist at once."""
    model, tokens = make_model(kind), torch.arange(0, 54, 5)
    with torch.no_grad():
        hidden = model.base_model(tokens[None], use_cache=False).last_hidden_state[0]
        assert torch.equal(model.get_output_embeddings()(hidden), model(tokens[None], use_cache=False).logits[0])


def test_the_command_exits_by_what_it_found(folder, shards, capsys):
    assert main(["convert", "verify", str(folder), str(shards), "--tokens", "8"]) == 0
    told = capsys.readouterr().out
    assert "tensors, 0.001 GB: equal, bit for bit" in told
    assert "0 of 96 routes differ" in told
    edit(folder, lambda t: t[NAME].neg_())
    assert main(["convert", "verify", str(folder), str(shards), "--no-forward"]) == 1
    told = capsys.readouterr().out
    assert NAME in told
    assert "135 tensors, 0.001 GB: 1 differs" in told
    assert main(["convert", "verify", str(folder), str(shards), "--no-forward", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["differences"][0]["name"] == NAME


@pytest.mark.parametrize("form", ["plain", "quantised"])
def test_what_may_be_left_out_is_left_out_of_the_forward_too(form, tmp_path, capsys):
    if form == "plain":
        first = second = save_model(tmp_path / "hf", "softmax")
        edit(first, lambda t: t.update({"model.extra.weight": torch.ones(3)}))
    else:
        first = save_fp8(tmp_path / "fp8", "softmax")[0]
        write_files(first, {"a.safetensors": {**read_files(first), "model.extra.weight": torch.ones(3)}})
        (first / "b.safetensors").unlink()
        second = first
    command = ["convert", "verify", str(first), str(second), "--tokens", "8"]
    assert main(command) == 1
    assert "unmapped tensors: model.extra.weight" in capsys.readouterr().err.replace("\n", " ")
    assert main([*command, "--allow-unmapped", r"model\.extra\..*"]) == 0
    assert "(transformers and megatron)" in " ".join(capsys.readouterr().out.split())


def test_damage_is_found_and_refused(shards, tmp_path, capsys):
    path = shards / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert main(["convert", "inspect", str(shards)]) == 1
    told = capsys.readouterr().out.replace("\n", "")
    assert "rank_00001.safetensors does not match its SHA-256" in told
    assert "checksums: damaged" in told
    assert main(["convert", "export", str(shards), str(tmp_path / "back")]) == 1
    assert "use another copy, or --skip-checksums" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
    assert main(["convert", "export", str(shards), str(tmp_path / "back"), "--skip-checksums"]) == 0


def test_files_that_the_index_does_not_name_are_not_counted(folder, capsys):
    """Mistral's folders have all weights a second time, as `consolidated.safetensors`."""
    tensors = read_files(folder)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    write_files(folder, {file: {name: tensors[name] for name in held} for file, held in halves.items()})
    assert main(["convert", "inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {
        file: (folder / file).stat().st_size for file in ("a.safetensors", "b.safetensors")
    }


def test_inspection_as_json(shards, capsys):
    assert main(["convert", "inspect", str(shards), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["form"], told["architecture"], told["checksums"]) == ("megatron", "Qwen3MoeForCausalLM", "verified")
    assert told["layout"]["ep"] == 2
    assert told["tensors"][NAME] == {"shape": [24, 40], "dtype": "float32"}


def test_checkpoints_of_a_run_are_read_with_its_model(folder, shards, tmp_path, capsys):
    run = save_run(tmp_path / "run", shards, folder, steps=(2, 4))
    for path in (run, run / "checkpoints", run / "checkpoints" / "step_000002"):
        assert find(path).form == "run"
        assert not compare_weights(find(folder), find(path)).differences
    assert find(run).weights.parent.name == "step_000004"
    (tmp_path / "latest").symlink_to(run / "checkpoints" / "step_000002")
    assert find(tmp_path / "latest").weights.parent.name == "step_000002"
    assert main(["convert", "inspect", str(run)]) == 0
    assert "checksums: verified" in capsys.readouterr().out
    (run / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="--settings"):
        find(run)
    assert not compare_weights(find(folder), find(run, settings=folder)).differences


def test_settings_go_to_the_side_that_lost_its_own(folder, shards, tmp_path, capsys):
    run = save_run(tmp_path / "run", shards, folder)
    (run / "config.yaml").unlink()
    for sides in ((folder, run), (run, folder), (run, run), (shards, run)):
        command = ["convert", "verify", *map(str, sides), "--no-forward"]
        assert main(command) == 1
        assert "with --settings" in " ".join(capsys.readouterr().err.split())
        assert main([*command, "--settings", str(folder)]) == 0
        assert "equal, bit for bit" in capsys.readouterr().out
    assert main(["convert", "verify", str(folder), str(shards), "--no-forward", "--settings", str(folder)]) == 2
    told = capsys.readouterr().err.replace("\n", "").replace(" ", "")
    assert f"{folder}and{shards}bothhavetheirownconfig.json,leaveitout" in told


def test_what_is_no_model_is_told(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"is no model: it has neither config\.json"):
        find(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        find(tmp_path / "nowhere")
    (tmp_path / "empty" / "config.yaml").write_text("run: {}\n")
    with pytest.raises(CheckpointError, match="is a run without a complete checkpoint"):
        find(tmp_path / "empty")
    with pytest.raises(ConfigError, match="--settings is for checkpoints of runs"):
        find(folder, settings=folder)


def test_the_list_has_every_family_and_every_refusal(capsys):
    assert main(["convert", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in rows if row["family"]] == sorted(families.names())
    assert {row["architectures"][0] for row in rows if not row["family"]} == set(UNSUPPORTED)
    assert main(["convert", "--list"]) == 0
    assert "Qwen3MoeForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "needs an action"),
        (["import", "nowhere", "out"], "nowhere cannot be opened"),
        (["inspect", "nowhere", "--threads", "0"], "--threads is 0"),
    ],
)
def test_faults_of_the_command_line(arguments, told, capsys):
    assert main(["convert", *arguments]) in (1, 2)
    assert told in capsys.readouterr().err


def test_sizes_are_read_with_their_units():
    assert [num_bytes(text) for text in ("5GB", "1.5 KiB", "70")] == [5_000_000_000, 1536, 70]
    for text in ("", "GB", "-1MB", "5 apples"):
        with pytest.raises(Exception, match="is no size"):
            num_bytes(text)


def test_every_argument_of_an_action_is_explained():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (actions,) = (action for action in parser._actions if isinstance(action.choices, dict))
    assert isinstance(actions.choices, dict)
    assert actions.choices.keys() == {"import", "export", "verify", "inspect"}
    for name, action in actions.choices.items():
        assert all(argument.help for argument in action._actions), name


def test_the_tool_is_the_command(folder):
    tool = Path(__file__).resolve().parents[3] / "tools" / "convert_checkpoint.py"
    done = subprocess.run(
        [sys.executable, str(tool), "inspect", str(folder)], capture_output=True, text=True, check=True
    )
    assert "Qwen3MoeForCausalLM, a Hugging Face folder" in done.stdout
