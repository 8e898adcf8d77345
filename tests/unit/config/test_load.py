"""load_config: layers, plugin nodes, presets, overrides, and a message for every kind of bad input."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.config import schema
from moerl.config.load import as_dict, config_from_dict, load_config, read_values, resolved_yaml
from moerl.config.overlay import every_key, fields_of
from moerl.errors import ConfigError

PRESETS = {
    "gspo": {"level": "seq_geo", "trust": {"name": "clip", "low": 3e-4, "high": 4e-4}, "filters": ["zero_variance"]},
    "cispo": {"form": "score", "trust": {"name": "is_clip", "max": 5.0}},
    "broken": {"levle": "token"},
}
BASE = """
run: {name: demo, num_steps: 10}
model: {path: model}
data: {train: [{name: sums, source: {path: sums.jsonl}}]}
reward: {rewards: [exact]}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str):
    return load_config(write(folder, "c.yaml", BASE + text), overrides, presets=PRESETS)


def message(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


# Layers


def test_an_extending_file_lies_over_the_extended_ones_in_order(tmp_path):
    write(tmp_path, "a.yaml", BASE + "optim: {lr: 1e-6, beta1: 0.5}\n")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "b.yaml", "optim: {lr: 2e-6, beta2: 0.7}\n")
    path = write(tmp_path, "c.yaml", "extends: [a.yaml, sub/b.yaml]\noptim: {eps: 1e-5}\n")
    optim = load_config(path, ["optim.eps=1e-4"]).optim
    assert (optim.lr, optim.beta1, optim.beta2, optim.eps) == (2e-6, 0.5, 0.7, 1e-4)


def test_two_files_may_extend_the_same_base(tmp_path):
    write(tmp_path, "base.yaml", BASE)
    write(tmp_path, "a.yaml", "extends: base.yaml\noptim: {lr: 1.0}\n")
    write(tmp_path, "b.yaml", "extends: base.yaml\nrun: {seed: 3}\n")
    cfg = load_config(write(tmp_path, "c.yaml", "extends: [a.yaml, b.yaml]\n"))
    assert (cfg.optim.lr, cfg.run.seed) == (1.0, 3)


def test_a_circle_of_extends_is_refused_with_its_files(tmp_path):
    write(tmp_path, "a.yaml", "extends: b.yaml\n")
    path = write(tmp_path, "b.yaml", "extends: a.yaml\n")
    with pytest.raises(ConfigError, match=r"a\.yaml.*circle \(b\.yaml -> a\.yaml -> b\.yaml\)"):
        load_config(path)


def test_an_empty_section_is_the_default(tmp_path):
    assert load(tmp_path, "optim:\n").optim == schema.OptimSection()


def test_lists_are_replaced_whole(tmp_path):
    write(tmp_path, "a.yaml", BASE + "rollout: {stop: [a, b]}\n")
    assert load_config(write(tmp_path, "b.yaml", "extends: a.yaml\nrollout: {stop: [c]}\n")).rollout.stop == ["c"]


# Plugin nodes and presets


def test_a_bare_name_is_a_node_and_merges_with_the_node_of_that_name(tmp_path):
    text = "algorithm: {preset: gspo, trust: clip}\n"
    assert load(tmp_path, text).algorithm.trust == {"name": "clip", "low": 3e-4, "high": 4e-4}


def test_an_argument_merges_into_the_preset_node(tmp_path):
    algorithm = load(tmp_path, "algorithm: {preset: gspo, trust: {low: 1.0}}\n", "algorithm.trust.high=2.0").algorithm
    assert algorithm.trust == {"name": "clip", "low": 1.0, "high": 2.0}
    assert algorithm.level == "seq_geo"


@pytest.mark.parametrize("override", ["trust=is_clip", "trust.name=is_clip", "trust={name: is_clip}"])
def test_another_name_replaces_the_whole_node(tmp_path, override):
    assert load(tmp_path, "algorithm: {preset: gspo}\n", f"algorithm.{override}").algorithm.trust == {"name": "is_clip"}


def test_precedence_schema_preset_yaml_override(tmp_path):
    text = "algorithm: {preset: gspo, level: token}\n"
    assert load(tmp_path, "").algorithm.level == "token"
    assert load(tmp_path, "algorithm: {preset: gspo}\n").algorithm.level == "seq_geo"
    assert load(tmp_path, text).algorithm.level == "token"
    assert load(tmp_path, text, "algorithm.level=geo_clip").algorithm.level == "geo_clip"


def test_the_preset_may_come_from_an_override(tmp_path):
    algorithm = load(tmp_path, "algorithm: {preset: gspo}\n", "algorithm.preset=cispo").algorithm
    assert (algorithm.form, algorithm.level, algorithm.trust["max"]) == ("score", "token", 5.0)


def test_names_in_lists_of_nodes(tmp_path):
    assert load(tmp_path, "algorithm: {preset: gspo}\n").algorithm.filters == [{"name": "zero_variance"}]
    assert load(tmp_path, "algorithm: {preset: gspo, filters: []}\n").algorithm.filters == []


def test_an_unknown_preset_names_the_nearest(tmp_path):
    assert "'gsppo'; did you mean 'gspo'? Known: broken, cispo, gspo" in message(tmp_path, "", "algorithm.preset=gsppo")


def test_a_preset_is_checked_like_a_file(tmp_path):
    assert "preset 'broken': unknown key 'algorithm.levle'" in message(tmp_path, "algorithm: {preset: broken}\n")


def test_default_nodes_hold_only_a_name():
    """A default argument would survive the replacement of its node in list elements; it belongs to the plugin."""
    for section in (item for item in vars(schema).values() if dataclasses.is_dataclass(item)):
        for item in dataclasses.fields(section):
            if "plugin" in item.metadata:
                assert set(item.default_factory()) <= {"name"}, f"{section.__name__}.{item.name}"


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=1e-6", "optim.lr", 1e-6),
        ("optim.lr=3", "optim.lr", 3.0),
        ("run.name=12e5", "run.name", "12e5"),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name='007'", "run.name", "007"),
        ("parallel.virtual_pipeline=null", "parallel.virtual_pipeline", None),
        ("rollout.stop=[x, 'y z']", "rollout.stop", ["x", "y z"]),
        ("data.shuffle=false", "data.shuffle", False),
        ("run.resume=true", "run.resume", "auto"),
        ("run.resume=false", "run.resume", "never"),
        ("telemetry.progress=off", "telemetry.progress", "off"),
        ("run.name=n${run.num_steps}", "run.name", "n10"),
        ("model.path=/a: b", "model.path", "/a: b"),
    ],
)
def test_override_values(tmp_path, override, path, value):
    section, key = path.split(".")
    seen = getattr(getattr(load(tmp_path, "", override), section), key)
    assert seen == value
    assert type(seen) is type(value)


@pytest.mark.parametrize("key", ["data.train.0.weight", "data.train[0].weight"])
def test_an_override_reaches_into_a_list(tmp_path, key):
    (dataset,) = load(tmp_path, "", f"{key}=2").data.train
    assert (dataset.weight, dataset.source) == (2.0, {"name": "file", "path": "sums.jsonl"})


def test_an_override_reaches_into_a_list_of_nodes(tmp_path):
    assert load(tmp_path, "", "reward.rewards.0.weight=0.5").reward.rewards == [{"name": "exact", "weight": 0.5}]


# Bad input: every message names the file or override, the field, the value, what is allowed


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optim: {lrr: 1}\n", ["c.yaml", "unknown key 'optim.lrr'", "did you mean 'optim.lr'?", "min_lr_fraction"]),
        ("optimm: {lr: 1}\n", ["c.yaml", "unknown key 'optimm'", "'optim'"]),
        ("lr: 1\n", ["unknown key 'lr'", "did you mean 'optim.lr'"]),
        ("optim: {lr: fast}\n", ["c.yaml", "optim.lr is 'fast'", "a number"]),
        ("optim: 3\n", ["optim is 3", "a mapping with keys among"]),
        ("rollout: {group_size: 2.5}\n", ["rollout.group_size is 2.5", "a whole number"]),
        ("rollout: {group_size: null}\n", ["rollout.group_size is None", "a whole number"]),
        ("optim: {decay_steps: x}\n", ["optim.decay_steps is 'x'", "a whole number or null"]),
        ("data: {shuffle: maybe}\n", ["data.shuffle is 'maybe'", "true or false"]),
        ("rollout: {stop: a}\n", ["rollout.stop is 'a'", "a list, each element text"]),
        ("data: {train: {name: x}}\n", ["data.train is {'name': 'x'}", "a list"]),
        ("data: {train: [{nmae: x}]}\n", ["unknown key 'data.train[0].nmae'", "'data.train[0].name'"]),
        ("data: {train: [{name: x, weight: y}]}\n", ["data.train[0].weight is 'y'", "a number"]),
        ("run: {output_dir: on}\n", ["run.output_dir is True", "YAML reads on, off", "text"]),
        ("algorithm: {trust: 3}\n", ["algorithm.trust is 3", "the name of a trust region or a mapping"]),
        ("reward: {rewards: exact}\n", ["reward.rewards is 'exact'", "a list of reward nodes"]),
        ("reward: {rewards: [{weight: 1}]}\n", ["reward.rewards[0] has no name"]),
        ("run: {output_dir: '${run.nmae}'}\n", ["run.output_dir", "run.nmae", "not found"]),
        ("run: {output_dir: '${oc.env:HOME}'}\n", ["run.output_dir reads the environment"]),
    ],
)
def test_bad_values_in_a_file(tmp_path, text, parts):
    path = write(tmp_path, "c.yaml", "extends: base.yaml\n" + text)
    write(tmp_path, "base.yaml", BASE)
    with pytest.raises(ConfigError) as caught:
        load_config(path, presets=PRESETS)
    for part in parts:
        assert part in str(caught.value)


def test_a_fault_in_an_extended_file_names_that_file(tmp_path):
    write(tmp_path, "base.yaml", BASE + "optim: {lr: fast}\n")
    with pytest.raises(ConfigError, match=r"base\.yaml: optim\.lr is 'fast'"):
        load_config(write(tmp_path, "c.yaml", "extends: base.yaml\n"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.lr", ["'optim.lr'", "must be key=value"]),
        ("=3", ["must be key=value"]),
        ("optim.l=3", ["override 'optim.l=3'", "did you mean 'optim.lr'?"]),
        ("optim.lr=abc", ["override 'optim.lr=abc'", "optim.lr is 'abc'", "a number"]),
        ("optim.lr.x=1", ["optim.lr has no keys of its own", "a number"]),
        ("data.train.1.weight=2", ["data.train has 1 element(s)", "'1' is none of them"]),
        ("data.train.0.weigth=2", ["did you mean 'data.train[0].weight'?"]),
        ("algorithm.trust.low.x=1", ["algorithm.trust.low is None, not a mapping"]),
        ("extends=b.yaml", ["'extends' belongs in a YAML file"]),
    ],
)
def test_bad_overrides(tmp_path, override, parts):
    text = message(tmp_path, "", override)
    for part in parts:
        assert part in text


def test_all_faulty_overrides_come_together_and_good_ones_between_them_are_no_part_of_it(tmp_path):
    overrides = ["optim.lr=abc", "optim.beta1=0.8", "optm.lr=1", "rollout.group_size=2.5", "optim.beta2=x", "nonsense"]
    first, *lines = message(tmp_path, "", *overrides).splitlines()
    assert first == "5 faults in the configuration:"
    wanted = [
        "override 'optim.lr=abc': optim.lr is 'abc', but must be a number",
        "override 'optm.lr=1': unknown key 'optm'",
        "override 'rollout.group_size=2.5': rollout.group_size is 2.5, but must be a whole number",
        "override 'optim.beta2=x': optim.beta2 is 'x', but must be a number",
        "override 'nonsense': must be key=value",
    ]
    assert [line.startswith(f"  - {text}") for line, text in zip(lines, wanted, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "optim: {lr: a, beta1: b}\nrollout: {group_size: c, top_p: 0.9}\n",
            ["optim.lr", "optim.beta1", "rollout.group"],
        ),
        ("algorithm: {kl: {coefficient: a, target: b}, level: token}\n", ["algorithm.kl.coeff", "algorithm.kl.target"]),
        (
            "data: {train: [{name: x, weight: y}, {name: z, weight: q}]}\n",
            ["data.train[0].weight", "data.train[1].weight"],
        ),
        ("optim: {lrr: 1, lr: 2, beta: 3}\nrun: {nam: x}\n", ["key 'optim.lrr'", "key 'optim.beta'", "key 'run.nam'"]),
    ],
    ids=["sections", "nested", "elements", "keys"],
)
def test_all_faults_of_a_file_come_together(tmp_path, text, wanted):
    write(tmp_path, "base.yaml", BASE)
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "c.yaml", "extends: base.yaml\n" + text), presets=PRESETS)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{len(wanted)} faults in the configuration:"
    assert [name in line and "c.yaml: " in line for line, name in zip(lines, wanted, strict=True)] == [True] * len(
        wanted
    )


def test_every_missing_key_is_listed(tmp_path):
    path = write(tmp_path, "c.yaml", "data: {train: [{source: {path: x}}]}\n")
    with pytest.raises(
        ConfigError, match=r"no value for data\.train\[0\]\.name, model\.path, run\.name, run\.num_steps"
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"optim: {lr: 1}\noptim: {lr: 2}\n", r"c\.yaml:2: not valid YAML: found duplicate key .*optim"),
        (b"optim: {lr: 1, lr: 2}\n", r"duplicate key .*lr"),
        (b"optim: {lr: 1\n", r"c\.yaml:\d+: not valid YAML"),
        (b"- a\n- b\n", r"c\.yaml: must be a mapping of sections .* but is a list"),
        (b"just words\n", r"c\.yaml: unknown key 'just words'"),
        (b"run: \xff\xfe\n", r"c\.yaml: not (UTF-8 text|valid YAML)"),
        (b"extends: 3\n", r"'extends' is 3, but must be a file name or a list"),
        (b"extends: nowhere.yaml\n", r"no configuration file .*nowhere\.yaml \(extended by .*c\.yaml\)"),
    ],
)
def test_bad_files(tmp_path, content, pattern):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=pattern):
        load_config(path)


def test_a_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path, "gspo.yaml", BASE)
    with pytest.raises(ConfigError, match=r"no configuration file .*gsop\.yaml; did you mean .*gspo\.yaml\?"):
        load_config(tmp_path / "gsop.yaml")
    with pytest.raises(ConfigError, match=r"the folder .*nope does not exist"):
        load_config(tmp_path / "nope" / "a.yaml")


# The resolved file


@given(
    name=st.text(min_size=1).filter(lambda text: not any(0xD800 <= ord(char) <= 0xDFFF for char in text)),
    lr=st.floats(allow_nan=False),
    stop=st.lists(st.sampled_from(["${x}", "a: b", "yes", "1e3", "\n", "#", "\\", "null", "~", ""])),
)
@settings(max_examples=12)
def test_the_resolved_file_reads_back_equal(tmp_path_factory, name, lr, stop):
    values = {
        "run": {"name": name.replace("$", ""), "num_steps": 1},
        "model": {"path": "m"},
        "optim": {"lr": lr},
        "rollout": {"stop": [text.replace("${", "\\${") for text in stop]},
    }
    cfg = config_from_dict(values)
    assert cfg.rollout.stop == stop
    path = tmp_path_factory.mktemp("resolved") / "config.yaml"
    path.write_text(resolved_yaml(cfg))
    assert load_config(path, presets=PRESETS) == cfg


def test_the_resolved_file_of_a_preset_reads_back_equal(tmp_path):
    cfg = load(tmp_path, "algorithm: {preset: gspo, filters: []}\n", "algorithm.trust=is_clip")
    path = write(tmp_path, "config.yaml", resolved_yaml(cfg))
    assert load_config(path, presets=PRESETS) == cfg
    assert read_values(path) == as_dict(cfg)


# The schema itself


def test_every_key_has_a_declared_kind():
    keys = list(every_key())
    assert {"run.name", "algorithm.trust", "parallel.expert_tensor", "batch.max_tokens_per_microbatch"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert fields_of(schema.RunConfig)["run"].section is schema.RunSection


def test_the_room_imports_nothing_heavy():
    code = (
        "import sys, moerl.config.load, moerl.config.rules, moerl.config.resume;"
        "print([name for name in ('torch', 'transformers', 'megatron', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_values_that_a_file_sets_for_another_preset_are_told(tmp_path, caplog):
    text = "algorithm: {preset: gspo, level: token, trust: {low: 0.1, high: 0.2}}"
    cfg = load(tmp_path, text, "algorithm.preset=cispo", "algorithm.level=seq_geo")
    assert cfg.algorithm.trust == {"name": "is_clip", "max": 5.0, "low": 0.1, "high": 0.2}
    [told] = caplog.messages
    assert told.startswith(f"algorithm.preset=cispo stands over {tmp_path / 'c.yaml'}, which is written for gspo: alg")
    assert ": algorithm.trust stay" in told, "the level is given anew"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("algorithm: {preset: gspo, level: token}", ()),
        ("algorithm: {preset: gspo}", ("algorithm.preset=cispo",)),
        ("algorithm: {level: token}", ("algorithm.preset=cispo",)),
        ("algorithm: {preset: gspo, level: token}", ("algorithm.preset=cispo", "algorithm.level=seq_geo")),
    ],
)
def test_values_of_ones_own_are_no_surprise(tmp_path, caplog, text, overrides):
    load(tmp_path, text, *overrides)
    assert caplog.messages == []
