"""Command lines of SGLang servers, and what is refused before one starts. What SGLang says of them: tests/sglang."""

from __future__ import annotations

import dataclasses

import pytest

from moerl.errors import ConfigError
from moerl.registry import build_dataclass
from moerl.rollout.sglang.arguments import (
    BOUNDS,
    CHOICES,
    FLAGS,
    SWITCHED_OFF,
    SWITCHES,
    SglangServerConfig,
    arguments,
    check,
    faults,
)


def found(*, has_cuda=True, routes=False, **fields):
    return list(faults(SglangServerConfig(**fields), has_cuda=has_cuda, returns_routes=routes))


def line(config=None, device="cuda", index=0, routes=False):
    return arguments(
        config or SglangServerConfig(), model_path="/m", port=1, index=index, device=device, returns_routes=routes
    )


GOOD = {
    "plain": {},
    "experts": {"tensor": 8, "expert": 8, "attention_data": 8, "moe_a2a_backend": "deepep"},
    "some experts": {"tensor": 8, "expert": 4},
    "eplb": {"tensor": 8, "expert": 8, "eplb": True, "redundant_experts": 16, "moe_a2a_backend": "deepep"},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "fp8_gemm_backend": "deep_gemm"},
    "colocated": {"memory_saver": True, "weights_cpu_backup": True, "memory_fraction": 0.5},
    "on policy": {"on_policy_target": "fsdp", "attention_backend": "fa3"},
    "hierarchical": {"hierarchical_cache": True},
    "extra": {"extra_args": ["--page-size", "64", "--schedule-policy=lpm"]},
    "open": {"host": "0.0.0.0"},
    "v6": {"host": "::1"},
}
BAD = {
    "tp 2 with ep 4": (
        {"tensor": 2, "expert": 4},
        "rollout.engine.servers.expert is 4, but must divide rollout.engine.servers.tensor, which is 2: 1, 2",
    ),
    "attention": ({"tensor": 4, "attention_data": 3}, "attention_data is 3, but must divide"),
    "dense": ({"tensor": 4, "dense_tensor": 3}, "dense_tensor is 3, but must divide"),
    "deepep with ep below tp": (
        {"tensor": 8, "expert": 4, "moe_a2a_backend": "deepep"},
        "expert is 4, but moe_a2a_backend 'deepep' has every expert on one rank: it must equal",
    ),
    "deepep alone": ({"moe_a2a_backend": "deepep"}, "with tensor 1 there is nobody to send to"),
    "eplb": ({"eplb": True}, "eplb is True, but rollout.engine.servers.expert is 1"),
    "copies": ({"redundant_experts": 4}, "redundant_experts is 4, but must be 0 where eplb is False"),
    "backup": ({"weights_cpu_backup": True}, "nothing is released without rollout.engine.servers.memory_saver"),
    "word": ({"quantization": "fp-8"}, "quantization is 'fp-8', but must be one of none, fp8"),
    "target": ({"on_policy_target": "megatron"}, "on_policy_target is 'megatron', but must be one of none, fsdp"),
    "fraction": ({"memory_fraction": 1.5}, "memory_fraction is 1.5, but must be in (0, 1)"),
    "count": ({"num_servers": 0}, "num_servers is 0, but must be a finite number of at least 1"),
    "host": ({"host": "example.org"}, "host is 'example.org', but must be an address of this machine"),
    "exact": ({"deterministic": True, "attention_backend": "flashmla"}, "deterministic numerics need one of auto, fa3"),
    "mode": ({"deepep_mode": "normal"}, "deepep_mode is 'normal', but moe_a2a_backend is 'none'"),
    "cache": ({"hierarchical_cache": True, "radix_cache": False}, "needs rollout.engine.servers.radix_cache"),
    "pipeline": ({"tensor": 2, "pipeline": 2, "attention_data": 2}, "pipeline is 2, but must be 1 where"),
    "key": ({"extra_args": ["--admin-api-key", "x"]}, "extra_args has --admin-api-key, which moerl sets itself"),
    "config": ({"extra_args": ["--config=a.yaml"]}, "extra_args has --config, which moerl sets itself"),
    "twice": ({"extra_args": ["--tp-size", "2"]}, "extra_args has --tp-size; set rollout.engine.servers.tensor"),
    "beginning of ours": ({"extra_args": ["--admin-api", "x"]}, "extra_args has --admin-api, which moerl sets itself"),
    "beginning": ({"extra_args": ["--tens", "2"]}, "extra_args has --tens; set rollout.engine.servers.tensor instead"),
    "alias": ({"extra_args": ["--ep=4"]}, "extra_args has --ep; set rollout.engine.servers.expert instead"),
    "replicas": ({"extra_args": ["--dp-size", "2"]}, "set rollout.engine.servers.num_servers instead"),
    "draft": (
        {"extra_args": ["--speculative-algorithm", "EAGLE"], "memory_saver": True},
        "extra_args has --speculative-algorithm, but with rollout.engine.servers.memory_saver it must not: the draft",
    ),
    "beginning of draft": (
        {"extra_args": ["--speculative-algo=EAGLE"], "memory_saver": True},
        "extra_args has --speculative-algo, but with rollout.engine.servers.memory_saver it must not",
    ),
    "underscores": ({"extra_args": ["--ep_size", "2"]}, "extra_args has --ep-size; set rollout.engine.servers.expert"),
}


@pytest.mark.parametrize("fields", GOOD.values(), ids=GOOD)
def test_what_is_fine(fields):
    assert found(**fields) == []


@pytest.mark.parametrize(("fields", "text"), BAD.values(), ids=BAD)
def test_what_is_refused(fields, text):
    faults_found = found(**fields)
    assert len(faults_found) == 1, faults_found
    assert text in faults_found[0]


def test_routes_refuse_what_makes_them_stale():
    assert "must be False where routes are replayed" in found(routes=True, hierarchical_cache=True)[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--speculative-algorithm", "EAGLE"], "draft model's router"),
        (["--speculative-algo", "EAGLE"], "draft model's router"),
        (["--enable-hicache"], "host tier"),
        (["--enable-lmcache"], "comes back from LMCache"),
        (["--enable_lmcache"], "comes back from LMCache"),
        (["--enable-flexkv"], "comes back from FlexKV"),
        (["--radix-cache-backend=flexkv"], "from a cache of its own"),
        (["--disaggregation-mode", "decode"], "takes over a prefix from another"),
    ],
)
def test_routes_refuse_arguments_that_make_them_stale(words, why):
    """Pitfalls 4 and 8."""
    assert found(extra_args=words) == []
    (fault,) = found(routes=True, extra_args=words)
    assert "with routes (R3) it must not: " in fault
    assert why in fault


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_a2a_backend", "deepep"),
        ("quantization", "fp8"),
        ("eplb", True),
        ("memory_saver", True),
        ("deterministic", True),
        ("on_policy_target", "fsdp"),
        ("attention_backend", "fa3"),
    ],
)
def test_a_cpu_refuses_what_needs_a_gpu(name, value):
    fields = {"tensor": 2, "expert": 2, name: value}
    assert found(**fields) == []
    (fault,) = found(has_cuda=False, **fields)
    assert fault.startswith(f"rollout.engine.servers.{name} is {value!r}, but must be ")
    assert fault.endswith("on a CPU: it needs a GPU")
    assert found(device="cpu", **fields) == [fault]


def test_cuda_without_a_device():
    assert "device is 'cuda', but this machine has no NVIDIA device" in found(has_cuda=False, device="cuda")[0]


def test_all_faults_come_in_one_error():
    config = SglangServerConfig(tensor=2, expert=4, quantization="int3", num_servers=0)
    with pytest.raises(ConfigError) as caught:
        check(config, has_cuda=True, returns_routes=False)
    assert len(caught.value.faults) == 3


def test_tables_name_fields_that_are_there_and_every_field_has_a_use():
    names = {item.name for item in dataclasses.fields(SglangServerConfig)}
    tables = [set(table) for table in (CHOICES, BOUNDS, FLAGS, SWITCHES, SWITCHED_OFF)]
    assert set().union(*tables) <= names
    ours = {"num_servers", "nodes", "python", "host", "device", "first_gpu", "start_seconds", "stop_seconds"}
    ours.add("extra_args")
    assert names - ours == set(FLAGS) | set(SWITCHES) | set(SWITCHED_OFF)


def test_defaults_are_allowed():
    config = SglangServerConfig()
    assert all(getattr(config, name) in allowed for name, allowed in CHOICES.items())


def test_yaml_is_read_strictly():
    node = {"tensor": 2, "expert": 2, "extra_args": ["--page-size", "64"], "memory_fraction": 0.5}
    assert build_dataclass(SglangServerConfig, node, where="x").tensor == 2
    with pytest.raises(ConfigError, match="unknown key 'tensors'; did you mean 'tensor'"):
        build_dataclass(SglangServerConfig, {"tensors": 2}, where="x")


def test_a_plain_line():
    assert " ".join(line()) == (
        "--model-path /m --host 127.0.0.1 --port 1 --device cuda --log-level-http warning --skip-server-warmup "
        "--log-level info --watchdog-timeout 600 --enable-metrics"
    )


def test_a_cpu_line_says_what_sglang_cannot_find_out():
    words = " ".join(line(device="cpu", routes=True))
    for part in (
        "--attention-backend torch_native",
        "--max-total-tokens 16384",
        "--disable-overlap-schedule",
        "--enable-return-routed-experts",
    ):
        assert part in words
    assert "--max-total-tokens 99" in " ".join(line(SglangServerConfig(max_total_tokens=99), device="cpu"))
    once = line(SglangServerConfig(overlap_schedule=False, attention_backend="torch_native"), device="cpu")
    assert once.count("--disable-overlap-schedule") == once.count("--attention-backend") == 1


def test_each_server_has_its_own_devices():
    config = SglangServerConfig(tensor=2, num_servers=3, first_gpu=2)
    assert "--base-gpu-id 2" in " ".join(line(config))
    assert "--base-gpu-id 6" in " ".join(line(config, index=2))
    assert "--base-gpu-id" not in line()
    assert "--base-gpu-id" not in line(config, device="cpu")


def test_the_line_ends_with_the_users_own():
    assert line(SglangServerConfig(extra_args=["--page-size", "64"]))[-2:] == ["--page-size", "64"]
