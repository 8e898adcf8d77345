"""check: every rule refuses its case, by name, and leaves the good configuration alone."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

import pytest

from moerl.config.choices import BOUNDS, CHOICES, Bounds, choice_fault, value_at
from moerl.config.load import as_dict, config_from_dict, load_config
from moerl.config.overlay import every_key, kind_at
from moerl.config.rules import RULES, check, config_errors
from moerl.errors import ConfigError


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "sums.jsonl").write_text("{}\n")
    path = tmp_path / "c.yaml"
    path.write_text(f"""
run: {{name: demo, num_steps: 10}}
model: {{path: {model}}}
data: {{train: [{{name: sums, source: {{path: {tmp_path}/sums.jsonl}}}}]}}
reward: {{rewards: [exact]}}
""")
    return path


def faults(base: Path, *overrides: str, world_size: int = 1) -> list[str]:
    return config_errors(load_config(base, overrides), world_size=world_size)


def test_the_defaults_pass(base):
    check(load_config(base))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.temperature=0"], ["rollout.temperature is 0.0", "above 0", "greedy"]),
        (["rollout.temperature=-1"], ["rollout.temperature is -1.0"]),
        (["rollout.temperature=nan"], ["rollout.temperature is nan"]),
        (["rollout.temperature=inf"], ["rollout.temperature is inf"]),
        (["rollout.top_p=0"], ["rollout.top_p is 0.0", "(0, 1]"]),
        (["rollout.top_p=1.5"], ["rollout.top_p is 1.5"]),
        (["optim.lr=nan"], ["optim.lr is nan", "finite"]),
        (["optim.beta1=1"], ["optim.beta1 is 1.0", "[0, 1)"]),
        (["run.num_steps=0"], ["run.num_steps is 0", "at least 1"]),
        (["precision.recompute=fulll"], ["did you mean 'full'?"]),
        (["run.resume=requird"], ["did you mean 'required'?"]),
        (["run.name=a/b"], ["run.name is 'a/b'", "one folder"]),
        (["run.name=.."], ["run.name is '..'"]),
        (["run.name="], ["run.name is ''"]),
        (["model.router_bias_update_rate=-1"], ["model.router_bias_update_rate is -1.0", "at least 0"]),
        (["model.router_bias_update_rate=0.001", "algorithm.routing=R3"], ["router_bias_update_rate", "'R3'", "none"]),
        (["model.freeze=['(']"], ["model.freeze holds '('", "regular expression"]),
        (["model.hidden_dropout=0.1"], ["model.hidden_dropout is 0.1", "algorithm.level=token", "set it to 0"]),
        (
            ["parallel.tensor=2"],
            ["parallel.tensor x parallel.pipeline x parallel.context = 2 x 1 x 1 = 2", "world size, 1"],
        ),
        (["parallel.expert=4"], ["parallel.expert x parallel.expert_tensor x parallel.pipeline = 4 x 1 x 1 = 4"]),
        (["parallel.virtual_pipeline=2"], ["parallel.virtual_pipeline is 2 with parallel.pipeline=1"]),
        (
            ["rollout.max_staleness=1", "rollout.engine=dataset"],
            ["rollout.max_staleness is 1 with rollout.engine=dataset", "no policy samples", "set it to 0"],
        ),
        (
            ["rollout.max_staleness=2", "algorithm.filters=[{name: duplicates, mode: resample}]"],
            ["rollout.max_staleness is 2 with algorithm.filters[0] (duplicates, mode=resample)", "set mode=mask"],
        ),
        (["rollout.max_staleness=-1"], ["rollout.max_staleness is -1", "at least 0"]),
        (["rollout.long_tail=drop"], ["rollout.long_tail is drop with rollout.max_staleness=0", "set", "to 1 or more"]),
        (["rollout.oversampling=1.5"], ["rollout.oversampling is 1.5 with rollout.max_staleness=0", "refill_rounds"]),
        (["rollout.oversampling=0.5"], ["rollout.oversampling is 0.5", "at least 1"]),
        (["rollout.long_tail=wiat"], ["did you mean 'wait'?"]),
        (["telemetry.trace_max_bytes=-1"], ["telemetry.trace_max_bytes is -1", "at least 0"]),
        (["rollout.group_size=1"], ["rollout.group_size is 1", "algorithm.advantage", "singleton=raw"]),
        (["batch.num_minibatches=17"], ["batch.num_minibatches is 17", "rollout.prompts_per_step, 16"]),
        (["batch.max_tokens_per_microbatch=1535"], ["1535", "data.max_prompt_tokens", "1024 + 512 = 1536"]),
        (["rollout.stop=['']"], ["rollout.stop", "must not be empty"]),
        (["evaluation.pass_at=[1,4,0]"], ["evaluation.pass_at holds [4, 0]", "evaluation.num_samples, 2"]),
        (["evaluation.maj_at=[3]"], ["evaluation.maj_at holds [3]", "evaluation.num_samples, 2"]),
        (["evaluation.best_of=[0]"], ["evaluation.best_of holds [0]", "evaluation.num_samples, 2"]),
        (["data.refilter.low=0.9", "data.refilter.high=0.8"], ["data.refilter.low is 0.9", "data.refilter.high, 0.8"]),
        (["data.refilter.high=1.1"], ["data.refilter.high is 1.1", "[0, 1]"]),
        (["data.refilter.return_after=0"], ["data.refilter.return_after is 0", "at least 1"]),
        (["telemetry.ngrams=[2,0]"], ["telemetry.ngrams holds [0]", "at least 1"]),
        (["telemetry.reflection_words=[wait,' ']"], ["telemetry.reflection_words", "must not be empty"]),
        (["optim.name=sgd", "optim.distributed=true"], ["optim.distributed is true with optim.name=sgd", "no state"]),
        (["optim.cpu_offload=true"], ["optim.cpu_offload is true without optim.distributed"]),
        (["optim.decay_steps=5"], ["optim.decay_steps is 5 with optim.schedule=constant"]),
        (["optim.schedule=linear", "optim.warmup_steps=10"], ["at step 10", "run.num_steps=10"]),
        (["optim.schedule=cosine", "optim.constant_steps=5", "optim.decay_steps=4"], ["optim.decay_steps=4"]),
        (
            ["optim.schedule=cosine", "optim.constant_steps=8", "algorithm.critic={init: policy, pretrain_steps: 2}"],
            ["run.num_steps less algorithm.critic.pretrain_steps=8; make the end later"],
        ),
        (["data.train=[]"], ["data.train is empty"]),
        (["data.train.0.weight=-1"], ["data.train[0].weight is -1.0"]),
        (["data.train.0.weight=0"], ["data.train[0].weight is 0.0", "above 0", "take the set out of the list"]),
        (["data.train.0.limit=0"], ["data.train[0].limit is 0", "null for every prompt"]),
        (["data.train.0.name='a b'"], ["data.train[0].name is 'a b'", "letters"]),
        (["data.train.0.source.path=gone.jsonl"], ["data.train[0].source.path is gone.jsonl", "no such file"]),
        (["data.train.0.source.path=null"], ["data.train[0].source.path is None", "jsonl"]),
        (["model.path=gone"], ["model.path is gone", "no such folder", "nothing is downloaded"]),
        (["reward.rewards=[]"], ["reward.rewards is empty"]),
        (["reward.rewards=[{name: exact, weight: x}]"], ["reward.rewards[0] (exact).weight is 'x'"]),
        (["reward.rewards=[{name: exact, weight: 0}]"], ["every weight is 0"]),
        (["reward.rewards=[{name: exact, datasets: [sumz]}]"], ["names 'sumz'", "the data sets are sums"]),
        (["reward.rewards=[{name: exact, datasets: sums}]"], ["datasets is 'sums'", "a list of data set names"]),
        (["algorithm.preset=sft"], ["algorithm.preset=sft", "rollout.engine=dataset, not local"]),
        (["rollout.engine=dataset", "algorithm.correction=tis"], ["algorithm.correction=tis compares with them"]),
        (
            ["rollout.group_size=1", "algorithm.advantage.transform=rank"],
            ["transform=rank, which compares the answers"],
        ),
        (["rollout.group_size=1", "algorithm.filters=[{name: zero_variance}]"], ["the filter zero_variance, which"]),
        (
            ["rollout.group_size=1", "algorithm.objective=group_dpo"],
            ["algorithm.objective=group_dpo, which pairs answers"],
        ),
        (
            ["algorithm.objective=group_dpo", "batch.max_tokens_per_microbatch=3071"],
            ["is 3071, but algorithm.objective=group_dpo keeps two answers together", "= 3072"],
        ),
        (
            ["algorithm.advantage.transform={name: decoupled, weights: [1, 2, 3]}"],
            ["transform.weights has 3 numbers, and reward.rewards has 1"],
        ),
        (["rollout.engine=dataset"], ["rollout.engine=dataset", "algorithm.level is token"]),
        (["rollout.engine=dataset", "data.refilter.every_steps=2"], ["refilter.every_steps is 2", "no pass rate"]),
        (["rollout.engine=dataset", "algorithm.routing=R3"], ["records no routes", "algorithm.routing is R3"]),
        (["precision.fp8=blockwise"], ["precision.fp8=blockwise", "trains in fp32 or bf16; set precision.fp8=none"]),
        (
            ["telemetry.profile={start_step: 11, num_steps: 1}"],
            ["telemetry.profile.start_step is 11", "run.num_steps=10"],
        ),
        (["telemetry.profile.num_steps=-1"], ["telemetry.profile.num_steps is -1", "at least 0"]),
        (["precision.head=bf16"], ["precision.head is 'bf16'", "params, fp32"]),
        (["precision.recompute=layers"], ["precision.recompute is 'layers'", "none, selective, full"]),
        (["parallel.dispatcher=alltoal"], ["parallel.dispatcher is 'alltoal'", "did you mean 'alltoall'"]),
        (
            ["parallel.dispatcher=allgather", "parallel.tensor=2", "parallel.expert=4"],
            ["parallel.dispatcher=allgather gathers equal shares", "4 x 1 must be at most parallel.tensor, 2"],
        ),
        (
            ["parallel.dispatcher=allgather", "parallel.pipeline=2"],
            ["parallel.dispatcher=allgather with parallel.pipeline=2", "variable_seq_lengths", "dispatcher=alltoall"],
        ),
        (["parallel.dispatcher=flex"], ["deep_ep is not installed", "parallel.tensor x parallel.expert is 1"]),
        (
            ["model.aux_loss_coefficient=0.1", "algorithm.routing=frozen_router"],
            ["model.aux_loss_coefficient is 0.1", "algorithm.routing=frozen_router", "set it to 0"],
        ),
        (
            ["model.hidden_dropout=0.1", "algorithm.level=none", "parallel.context=2"],
            ["parallel.context is 2 with dropout 0.1", "share one random state"],
        ),
    ],
)
def test_each_rule_refuses(base, overrides, parts):
    text = "\n".join(faults(base, *overrides))
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=1", "algorithm.advantage.singleton=raw"],
        ["rollout.group_size=1", "algorithm.advantage.center=batch_mean", "algorithm.advantage.scale=none"],
        [
            "rollout.engine=dataset",
            "algorithm.level=none",
            "algorithm.advantage={center: none, scale: none}",
            "rollout.group_size=1",
            "reward.rewards=[]",
        ],
        ["model.hidden_dropout=0.1", "algorithm.level=none"],
        ["batch.max_tokens_per_microbatch=1536"],
        ["batch.num_minibatches=16"],
        ["evaluation.num_samples=4", "evaluation.pass_at=[1,2,4]", "evaluation.maj_at=[4]", "evaluation.best_of=[4]"],
        ["data.refilter={every_steps: 2, low: 0.5, high: 0.5, return_after: 1}"],
        ["telemetry.ngrams=[]", "telemetry.reflection_words=[]"],
        ["optim.schedule=linear", "optim.warmup_steps=9"],
        ["reward.rewards=[{name: exact, datasets: [sums]}, {name: length, weight: 0}]"],
        ["rollout.temperature=0.6"],
        ["precision.params=bf16", "precision.head=fp32", "precision.recompute=full"],
        ["parallel.dispatcher=allgather", "parallel.overlap_grad_reduce=true"],
        ["model.aux_loss_coefficient=0.1"],
        ["telemetry.profile={start_step: 10, num_steps: 3}"],
    ],
)
def test_the_neighbouring_good_case_passes(base, overrides):
    assert faults(base, *overrides) == []


def test_several_processes_are_refused_with_the_arithmetic(base):
    assert faults(base, world_size=4) == []
    (fault,) = faults(base, "parallel.tensor=4", "parallel.context=2", world_size=4)
    assert "4 x 1 x 2 = 8 must divide the world size, 4" in fault
    (fault,) = faults(base, "parallel.expert=3", world_size=4)
    assert "parallel.expert x parallel.expert_tensor x parallel.pipeline = 3 x 1 x 1 = 3 must divide" in fault
    found = faults(base, "parallel.tensor=2")
    assert "start 2, or a multiple, with torchrun --standalone --nproc-per-node 2 -m moerl" in found[0]


def test_axes_that_do_not_cut_the_model_evenly_are_refused_with_its_sizes(base, tmp_path):
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2, "num_experts": 10}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes))

    def of(*overrides):
        return faults(base, *overrides, world_size=12)

    assert of("parallel.pipeline=2", "parallel.virtual_pipeline=3", "parallel.tensor=2", "parallel.expert=2") == []
    (fault,) = of("parallel.expert=4")
    assert fault == "parallel.expert is 4, but must divide the model's 10 experts"
    (fault,) = of("parallel.tensor=3")
    assert fault.startswith("parallel.tensor is 3, but must divide the model's 2 key-value heads, or be a multiple of")
    assert of("parallel.tensor=6") == []
    (fault,) = of("parallel.pipeline=4")
    assert fault == (
        "parallel.pipeline is 4, but must divide the model's 6 layers; set parallel.last_stage_layers=3, which leaves "
        "3 over 3: 1 each"
    )
    (fault,) = of("parallel.pipeline=2", "parallel.virtual_pipeline=2")
    assert fault.startswith(
        "parallel.pipeline x parallel.virtual_pipeline = 2 x 2 = 4, but must divide the model's 6 layers; set "
    )
    (fault,) = of("parallel.pipeline=2", "parallel.virtual_pipeline=1")
    assert fault == (
        "parallel.virtual_pipeline is 1 with parallel.pipeline=2, but it is the number of chunks that a stage is split "
        "into: set it to null for whole stages, or to 2 or more"
    )
    assert of("parallel.pipeline=4", "parallel.last_stage_layers=3") == []
    (fault,) = of("parallel.pipeline=4", "parallel.first_stage_layers=2")
    assert fault == (
        "6 layers over 4 stages: 6 - 2 in the first leave 4 over 3 stages, which 3 does not divide; set "
        "parallel.first_stage_layers=3, which leaves 3 over 3: 1 each"
    )
    (fault,) = of("parallel.pipeline=1", "parallel.first_stage_layers=2")
    assert fault.startswith("parallel.first_stage_layers is 2 with parallel.pipeline=1")
    assert "parallel.last_stage_layers is 0" in of("parallel.pipeline=2", "parallel.last_stage_layers=0")[0]


def test_a_step_too_small_for_its_ranks_is_refused(base):
    (fault,) = faults(
        base, "rollout.prompts_per_step=1", "rollout.group_size=2", "batch.num_minibatches=1", world_size=4
    )
    assert "1 x 2 = 2 samples leave some of 4 data-parallel ranks idle in every step" in fault


def test_fp8_is_refused_whether_or_not_transformer_engine_is_here(base):
    assert any(
        "precision.fp8=delayed" in fault for fault in faults(base, "precision.fp8=delayed", "precision.params=bf16")
    )


def test_missing_files_are_reported_together(base):
    found = faults(
        base, "model.path=gone", "data.train.0.source.path=a.jsonl", "evaluation.sets=[{name: h, source: {path: b}}]"
    )
    assert [fault.split(" is ")[0] for fault in found] == [
        "model.path",
        "data.train[0].source.path",
        "evaluation.sets[0].source.path",
    ]


def test_a_model_folder_without_its_parts(base, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "no *.safetensors" in faults(base)[0]
    assert faults(base, "model.init=random") == []
    (tmp_path / "model" / "config.json").unlink()
    assert "no config.json" in faults(base, "model.init=random")[0]


def test_a_data_set_that_nothing_scores(base, tmp_path):
    held = f"evaluation.sets=[{{name: held, source: {{path: {tmp_path}/sums.jsonl}}}}]"
    (fault,) = faults(base, held, "reward.rewards=[{name: exact, datasets: [sums]}]")
    assert "no reward of reward.rewards applies to data set 'held'" in fault


def test_two_data_sets_of_one_name(base, tmp_path):
    row = f"{{name: x, source: {{path: {tmp_path}/sums.jsonl}}}}"
    assert "data.train has 2 data sets called 'x'" in faults(base, f"data.train=[{row}, {row}]")[0]


@pytest.mark.parametrize("engine", ["local", "dataset"])
def test_a_name_of_training_and_evaluation_is_refused(base, tmp_path, engine):
    """With the `dataset` engine every held-out answer would be worth what the file's own completions are: 1."""
    row = f"source: {{path: {tmp_path}/sums.jsonl}}"

    def of(name: str) -> list[str]:
        return faults(
            base, f"rollout.engine={engine}", f"evaluation.sets=[{{name: {name}, {row}}}, {{name: x, {row}}}]"
        )

    assert [fault for fault in of("sums") if fault not in of("sums_heldout")] == [
        "data.train and evaluation.sets both have a data set called 'sums', but rewards tell data sets apart by their "
        "names: call the one in evaluation.sets otherwise, such as sums_heldout, also where a reward's datasets name it"
    ]


def test_all_faults_come_in_one_error_with_the_extra_rules(base):
    cfg = load_config(base, ["rollout.temperature=0", "optim.lr=-1", "rollout.oversampling=2"])

    def extra(values):
        return [f"preset is {values['algorithm']['preset']}", "twice", "twice"]

    with pytest.raises(ConfigError) as caught:
        check(cfg, extra_rules=[extra])
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 faults in the configuration:"
    assert len(lines) == 6
    assert "  - preset is None" in lines


def test_one_fault_is_one_sentence(base):
    with pytest.raises(ConfigError, match=r"^rollout\.temperature is 0\.0"):
        check(load_config(base, ["rollout.temperature=0"]))


# The tables


def test_every_number_outside_algorithm_has_bounds_and_every_entry_a_field():
    numbers, texts = set(), set()
    for path in every_key():
        annotation = kind_at(path).annotation
        types = {annotation} | set(typing.get_args(annotation))
        if types & {int, float} and typing.get_origin(annotation) is not list:
            numbers.add(path)
        if annotation is str:
            texts.add(path)
    outside = {path for path in numbers if not path.startswith("algorithm.") or path == "algorithm.refill_rounds"}
    assert set(BOUNDS) == outside - {"rollout.temperature"}
    assert set(CHOICES) <= texts


def test_every_default_is_allowed():
    values = as_dict(config_from_dict({"run": {"name": "x", "num_steps": 1}, "model": {"path": "m"}}))
    for path, allowed in CHOICES.items():
        assert value_at(values, path) in allowed, path
    for path, bounds in BOUNDS.items():
        value = value_at(values, path)
        assert value is None or bounds.holds(value), path


def test_bounds():
    assert not Bounds(0).holds(float("inf"))
    assert [Bounds(0, 1, open_low=True, open_high=True).holds(value) for value in (0, 0.5, 1)] == [False, True, False]
    assert [Bounds(0, 1).holds(value) for value in (0, 1, 1.1)] == [True, True, False]


def test_rules_are_pure(base):
    cfg = load_config(base, ["rollout.temperature=0"])
    before = dataclasses.asdict(cfg)
    for rule in RULES:
        assert list(rule(cfg)) == list(rule(cfg))
    assert dataclasses.asdict(cfg) == before


@pytest.mark.parametrize(
    ("path", "value", "nearest"),
    [("algorithm.routing", "r3", "R3"), ("algorithm.level", "seq-geo", "seq_geo"), ("run.resume", "AUTO", "auto")],
)
def test_a_word_outside_its_set_names_the_nearest(path, value, nearest):
    allowed = {"algorithm.routing": ("none", "R2", "R3"), "algorithm.level": ("token", "seq_geo")}.get(path) or CHOICES[
        path
    ]
    fault = choice_fault(path, value, allowed)
    assert f"{path} is {value!r}" in fault
    assert f"did you mean {nearest!r}?" in fault
    assert choice_fault(path, nearest, allowed) is None
