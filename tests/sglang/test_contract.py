"""Level 1, no server: our command lines through SGLang's parser and resolution, our buckets through its serializer.

One process of SGLang's environment answers all (its import takes half a minute).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sglang_process import inside

from moerl.rollout.sglang.arguments import (
    ALIASES,
    CHOICES,
    FLAGS,
    NOT_WITH_ROUTES,
    OURS,
    SWITCHED_OFF,
    SWITCHES,
    SglangServerConfig,
    arguments,
    faults,
)
from moerl.weight_sync.flat import laid_out, pack
from moerl.weight_sync.transports.tensor import serialised

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "configs" / "demo" / "policy"

EIGHT = {
    "tensor": 8,
    "expert": 8,
    "attention_data": 8,
    "moe_a2a_backend": "deepep",
    "moe_runner_backend": "deep_gemm",
    "eplb": True,
    "redundant_experts": 16,
    "eplb_dispatch": "dynamic",
    "eplb_interval_iterations": 500,
    "quantization": "fp8",
    "fp8_gemm_backend": "deep_gemm",
    "kv_cache_dtype": "fp8_e4m3",
    "memory_saver": True,
    "weights_cpu_backup": True,
    "attention_backend": "fa3",
    "memory_fraction": 0.8,
    "chunked_prefill_tokens": 8192,
    "max_running_requests": 256,
    "fp32_head": True,
    "dense_tensor": 1,
}
LINES = {
    "cpu": ("cpu", {"dtype": "float32"}),
    "cpu tp2 ep2": ("cpu", {"tensor": 2, "expert": 2, "max_total_tokens": 4096, "max_running_requests": 8}),
    "cuda": ("cuda", {}),
    "tp4 ep2": ("cuda", {"tensor": 4, "expert": 2}),
    "eight": ("cuda", EIGHT),
    "low latency": (
        "cuda",
        {"tensor": 8, "expert": 8, "moe_a2a_backend": "deepep", "deepep_mode": "low_latency", "attention_data": 4},
    ),
    "on policy": ("cuda", {"on_policy_target": "fsdp", "attention_backend": "fa3"}),
    "deterministic": ("cuda", {"deterministic": True, "attention_backend": "triton", "seed": 3}),
    "no caches": ("cuda", {"radix_cache": False, "overlap_schedule": False, "cuda_graph": False, "metrics": False}),
    "limits": (
        "cuda",
        {"max_total_tokens": 4096, "max_queued_requests": 64, "context_tokens": 128, "sampling_mask_max_tokens": 100},
    ),
    "pipeline": ("cuda", {"pipeline": 2, "dtype": "bfloat16"}),
    "third server": ("cuda", {"tensor": 2, "num_servers": 4, "watchdog_seconds": 77.5, "log_level": "warning"}),
    "extra": ("cuda", {"extra_args": ["--page-size", "16"]}),
}
EXPECTED = {
    "cpu": {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "max_total_tokens": "16384"},
    "cpu tp2 ep2": {"tp_size": "2", "ep_size": "2", "max_total_tokens": "4096"},
    "cuda": {"device": "cuda", "tp_size": "1", "skip_server_warmup": "True", "enable_return_routed_experts": "True"},
    "eight": {
        "tp_size": "8",
        "ep_size": "8",
        "attn_dp_size": "8",
        "moe_a2a_backend": "deepep",
        "enable_eplb": "True",
        "ep_num_redundant_experts": "16",
        "quantization": "fp8",
        "enable_memory_saver": "True",
        "enable_weights_cpu_backup": "True",
        "attention_backend": "fa3",
        "kv_cache_dtype": "fp8_e4m3",
        "mem_fraction_static": "0.8",
    },
    "low latency": {"deepep_mode": "low_latency", "attn_dp_size": "4"},
    "on policy": {"rl_on_policy_target": "fsdp", "enable_deterministic_inference": "True"},
    "deterministic": {"enable_deterministic_inference": "True", "random_seed": "3"},
    "no caches": {"disable_radix_cache": "True", "disable_overlap_schedule": "True", "enable_metrics": "False"},
    "limits": {"max_total_tokens": "4096", "max_queued_requests": "64", "context_length": "128"},
    "third server": {"base_gpu_id": "4", "watchdog_timeout": "77.5", "log_level": "warning"},
    "extra": {"page_size": "16"},
}
NOT_OURS = {
    "misspelt": ["--model-path", str(POLICY), "--tensor-parallel-sise", "2"],
    "no such target": ["--model-path", str(POLICY), "--rl-on-policy-target", "megatron"],
    "let through": [*("--model-path", str(POLICY), "--device", "cuda", "--tp-size", "2", "--ep-size", "4")],
}
"""What the answers of the process would look like if something were wrong; the last one SGLang accepts."""


ANY_WORD = {"log_level"}
"""Fields whose words SGLang's parser does not look at."""

BUCKETS = [
    {"a.weight": torch.linspace(-3, 3, 15).reshape(3, 5).bfloat16(), "b.bias": torch.arange(7).bfloat16()},
    {"c.weight": torch.linspace(-9, 9, 16).reshape(4, 4).to(torch.float8_e4m3fn), "c.scale": torch.ones(1, 1) / 3},
    {"d.odd": torch.arange(3).bfloat16(), "d.wide": torch.arange(3).float() / 7, "d.scalar": torch.tensor(1.5)},
]
"""Of one format, of two, and of such sizes that nothing behind the first is aligned."""


SPARE_BYTES = 40
"""Of the buffer, which is as large as the largest bucket."""


def laid(place):
    """Places of a bucket's tensors, as a sender lays them out, and the bytes."""
    entries, tensors = laid_out(list(BUCKETS[place].items()))
    flat = torch.zeros(entries[-1].stop + SPARE_BYTES, dtype=torch.uint8)
    pack(entries, tensors, flat)
    return entries, flat[: entries[-1].stop]


@pytest.fixture(scope="module")
def answers(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("buckets")
    buckets, alive = [], []
    for place, tensors in enumerate(BUCKETS):
        path = folder / f"{place}.safetensors"
        save_file(tensors, path)
        entries, flat = laid(place)
        alive.append(flat)  # its memory is what the other process opens
        names = [entry.name for entry in entries]
        buckets.append({"path": str(path), "names": names, "text": serialised(entries, flat)})
    lines = [
        arguments(
            SglangServerConfig(**fields),
            model_path=str(POLICY),
            port=1234,
            index=2,
            device=device,
            returns_routes=has_routes(fields),
        )
        for device, fields in LINES.values()
    ]
    return inside(python, {"lines": [*lines, *NOT_OURS.values()], "buckets": buckets})


def has_routes(fields):
    """Those of a pipeline are its first stage's alone, so that it is not asked for them."""
    return "pipeline" not in fields


@pytest.mark.parametrize("name", LINES)
def test_a_line_passes_the_parser_and_the_resolution(answers, name):
    device, fields = LINES[name]
    config = SglangServerConfig(**fields)
    assert list(faults(config, has_cuda=device == "cuda", returns_routes=has_routes(fields))) == []
    answer = answers["lines"][list(LINES).index(name)]
    assert "error" not in answer, answer
    expected = EXPECTED.get(name, {})
    assert {key: answer["resolved"][key] for key in expected} == expected


def test_the_parser_does_refuse(answers):
    for name in ("misspelt", "no such target"):
        assert "error" in answers["lines"][len(LINES) + list(NOT_OURS).index(name)]


def test_what_sglang_lets_through_we_refuse(answers):
    assert "error" not in answers["lines"][-1], "SGLang refuses this now: our own rule could go"
    assert list(faults(SglangServerConfig(tensor=2, expert=4), has_cuda=True, returns_routes=False))


def test_every_flag_that_we_name_is_one(answers):
    named = {*FLAGS.values(), *SWITCHES.values(), *SWITCHED_OFF.values(), *ALIASES, *OURS, *NOT_WITH_ROUTES}
    assert named - set(answers["flags"]) == set()


def test_every_word_that_we_allow_is_one(answers):
    """`auto` and `none` are never said: a flag is left out where its field has the default."""
    flags = {name: FLAGS[name] for name in CHOICES if name in FLAGS}
    assert {name for name, flag in flags.items() if answers["flags"][flag] is None} == ANY_WORD
    default = SglangServerConfig()
    for name in set(flags) - ANY_WORD:
        assert set(CHOICES[name]) - {getattr(default, name)} - set(answers["flags"][flags[name]]) == set(), name


@pytest.mark.parametrize("place", range(len(BUCKETS)))
def test_a_bucket_comes_back_bitwise(answers, place):
    bucket = answers["buckets"][place]
    assert bucket["same"] == dict.fromkeys(BUCKETS[place], True)


@pytest.mark.parametrize("place", range(len(BUCKETS)))
def test_a_bucket_lies_as_sglang_would_lay_it(answers, place):
    entries, _ = laid(place)
    laid_by_us = [
        [entry.name, list(entry.shape), str(entry.dtype), entry.start, entry.stop, entry.stop - entry.start]
        for entry in entries
    ]
    bucket = answers["buckets"][place]
    assert bucket["layout"] == bucket["own_layout"] == laid_by_us
    assert bucket["is_own"], "byte for byte"
