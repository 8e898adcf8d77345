"""How a server is started: a typed configuration, what SGLang 0.5.23 would fail at only later, and its arguments.

Every line that `arguments` makes passes SGLang's own parser and its resolution (`tests/sglang`). SGLang accepts more
than it can serve (tensor 2 with expert 4, a hierarchical cache whose routes are stale); `faults` says so beforehand.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from moerl.config.choices import Bounds, choice_fault
from moerl.errors import ConfigError
from moerl.rollout.sglang.route_support import NOT_WITH_ROUTES, route_faults
from moerl.rollout.sglang.suited import DRAFT, LOST_DRAFT

WHERE = "rollout.engine.servers"
"""Where the configuration stands in a run's."""

NODE = "node"
"""Value of `host`: this node's address as the run's first node reaches it; on that one, loopback."""

CPU_MAX_TOTAL_TOKENS = 16384
"""SGLang cannot tell a CPU rank's memory: what its cache holds is said."""

CHOICES: dict[str, tuple[str, ...]] = {
    "nodes": ("first", "all"),
    "device": ("auto", "cuda", "cpu"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "moe_a2a_backend": (
        *("none", "deepep", "deepep_v2", "mooncake", "nixl", "mori", "flashinfer", "megamoe", "pplx"),
        "flashinfer_megamoe",
    ),
    "deepep_mode": ("auto", "normal", "low_latency"),
    "deepep_dispatch_dtype": ("auto", "bf16", "fp8", "int8", "nvfp4"),
    "moe_runner_backend": (
        *("auto", "deep_gemm", "triton", "triton_kernel", "cutlass", "marlin", "humming", "flashinfer_cutlass"),
        *("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl", "flashinfer_mxfp4", "megamoe"),
    ),
    "eplb_dispatch": ("auto", "static", "dynamic", "fake", "lp"),
    "quantization": ("none", "fp8", "mxfp8", "w8a8_fp8", "compressed-tensors", "modelopt_fp8"),
    "fp8_gemm_backend": (
        *("auto", "deep_gemm", "cutlass", "triton", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_deepgemm"),
    ),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
    "attention_backend": ("auto", "fa3", "fa4", "flashinfer", "triton", "flashmla", "trtllm_mha", "torch_native"),
    "on_policy_target": ("none", "fsdp"),
    "log_level": ("debug", "info", "warning", "error"),
}
_COUNT, _NOT_NEGATIVE, _POSITIVE = Bounds(1), Bounds(0), Bounds(0, open_low=True)
BOUNDS: dict[str, Bounds] = {
    "num_servers": _COUNT,
    "tensor": _COUNT,
    "expert": _COUNT,
    "attention_data": _COUNT,
    "pipeline": _COUNT,
    "dense_tensor": _COUNT,
    "redundant_experts": _NOT_NEGATIVE,
    "eplb_interval_iterations": _COUNT,
    "sampling_mask_max_tokens": _COUNT,
    "max_total_tokens": _COUNT,
    "max_running_requests": _COUNT,
    "max_queued_requests": _COUNT,
    "chunked_prefill_tokens": _COUNT,
    "context_tokens": _COUNT,
    "memory_fraction": Bounds(0, 1, open_low=True, open_high=True),
    "first_gpu": _NOT_NEGATIVE,
    "seed": Bounds(0, 2**32 - 1),
    "watchdog_seconds": _POSITIVE,
    "start_seconds": _POSITIVE,
    "stop_seconds": _POSITIVE,
}
DETERMINISTIC_BACKENDS = ("auto", "fa3", "fa4", "flashinfer", "triton")
OURS = (
    *("--model-path", "--model", "--host", "--port", "--api-key", "--admin-api-key", "--config", "--device"),
    *("--enable-return-routed-experts", "--weight-version", "--grpc-port", "--smg-grpc-mode", "--use-ray"),
    *("--skip-server-warmup", "--log-level-http"),
)
"""Arguments that moerl sets itself, and those that would bypass its key."""


@dataclass(frozen=True)
class SglangServerConfig:
    """Arguments of `rollout.engine.servers`: one or more equal servers on a node."""

    num_servers: int = 1
    """On each node that has some."""
    nodes: str = "first"
    """Which nodes of the run have servers: the `first`, or `all`. With `all`, `host` must be one that the first node
    reaches (`node`), and a node's processes must leave the servers' devices free."""
    python: str = "auto"
    """Of the servers' own environment; `auto` is `.venv-sglang/bin/python` beside moerl, which `make sglang` makes."""
    host: str = "127.0.0.1"
    """Address to listen on; one that others can reach is a choice, and every request needs the run's key. `node`: on
    the run's first node 127.0.0.1, on another one its address on the way to the first."""
    device: str = "auto"
    """`auto`: cuda where this machine has an NVIDIA device."""
    first_gpu: int = 0
    """Server i takes `tensor * pipeline` devices from `first_gpu + i * tensor * pipeline`."""

    tensor: int = 1
    expert: int = 1
    """Divides `tensor`."""
    attention_data: int = 1
    """Attention data parallelism inside the tensor axis; divides `tensor`."""
    pipeline: int = 1
    dense_tensor: int | None = None
    """Tensor axis of the dense layers of a mixture; None: as the rest."""
    moe_a2a_backend: str = "none"
    """How tokens reach their experts; `deepep` needs `expert` = `tensor`."""
    deepep_mode: str = "auto"
    deepep_dispatch_dtype: str = "auto"
    moe_runner_backend: str = "auto"
    eplb: bool = False
    """Move experts between ranks by their load. Routes keep their logical ids."""
    redundant_experts: int = 0
    """Copies of busy experts; experts + copies is a multiple of `expert`."""
    eplb_interval_iterations: int = 1000
    eplb_dispatch: str = "auto"

    dtype: str = "auto"
    quantization: str = "none"
    """`fp8` quantises bf16 weights once, as they are loaded, so no run takes it; a folder in FP8 says so itself."""
    fp8_gemm_backend: str = "auto"
    kv_cache_dtype: str = "auto"
    fp32_head: bool = False
    attention_backend: str = "auto"
    """`auto`: SGLang's choice; torch_native on a CPU."""
    deterministic: bool = False
    """Kernels whose results do not depend on the batch."""
    on_policy_target: str = "none"
    """`fsdp`: numerics that match a torch trainer's; includes `deterministic`."""

    memory_saver: bool = False
    """Memory can be released and taken back between rollouts (colocated training)."""
    weights_cpu_backup: bool = False
    """Weights survive a release; not needed where they are sent after each step."""
    max_total_tokens: int | None = None
    """Size of the cache; None: what fits (16384 on a CPU)."""
    max_running_requests: int | None = None
    max_queued_requests: int | None = None
    memory_fraction: float | None = None
    """Of a device's memory, for weights and cache."""
    chunked_prefill_tokens: int | None = None
    context_tokens: int | None = None
    sampling_mask_max_tokens: int | None = None
    """Largest top-k whose support can be returned; None: SGLang's own."""
    radix_cache: bool = True
    """Prompts of a group share their prefix."""
    hierarchical_cache: bool = False
    overlap_schedule: bool = True
    """Always off on a CPU."""
    cuda_graph: bool = True
    seed: int | None = None

    metrics: bool = True
    log_level: str = "info"
    watchdog_seconds: float = 600.0
    """A forward pass that lasts longer ends the server."""
    start_seconds: float = 900.0
    stop_seconds: float = 10.0
    """Between asking a server to end and killing it."""
    extra_args: list[str] = field(default_factory=list)
    """Further arguments of `sglang.launch_server`, passed as they are."""


def check(config: SglangServerConfig, *, has_cuda: bool, returns_routes: bool) -> None:
    """All of `faults` in one error.

    Raises:
        ConfigError: there is at least one.
    """
    found = list(faults(config, has_cuda=has_cuda, returns_routes=returns_routes))
    if found:
        raise ConfigError(*found)


def device_of(config: SglangServerConfig, *, has_cuda: bool) -> str:
    """`cuda` or `cpu`."""
    return config.device if config.device != "auto" else ("cuda" if has_cuda else "cpu")


def faults(config: SglangServerConfig, *, has_cuda: bool, returns_routes: bool) -> Iterator[str]:
    """What is wrong, each with the field, its value and what is allowed."""
    for name, allowed in CHOICES.items():
        if (fault := choice_fault(f"{WHERE}.{name}", getattr(config, name), allowed)) is not None:
            yield fault
    for name, bounds in BOUNDS.items():
        value = getattr(config, name)
        if value is not None and not bounds.holds(value):
            yield f"{WHERE}.{name} is {value!r}, but must be {bounds}"
    yield from _host_faults(config)
    if min(config.tensor, config.expert, config.attention_data) >= 1:
        yield from _axis_faults(config)
    yield from _combination_faults(config, returns_routes)
    if returns_routes:
        yield from route_faults(config, WHERE)
    yield from _extra_faults(config, returns_routes)
    device = device_of(config, has_cuda=has_cuda)
    if device == "cpu":
        yield from _cpu_faults(config)
    elif device == "cuda" and not has_cuda:
        yield f"{WHERE}.device is 'cuda', but this machine has no NVIDIA device; use cpu or auto"


def _host_faults(config: SglangServerConfig) -> Iterator[str]:
    try:
        ipaddress.ip_address(config.host)
    except ValueError:
        if config.host not in ("localhost", NODE):
            yield f"{WHERE}.host is {config.host!r}, but must be an address of this machine, such as 127.0.0.1, or node"


def _axis_faults(config: SglangServerConfig) -> Iterator[str]:
    for name in ("expert", "attention_data", "dense_tensor"):
        value = getattr(config, name)
        if value is not None and value >= 1 and config.tensor % value:
            yield (
                f"{WHERE}.{name} is {value}, but must divide {WHERE}.tensor, which is {config.tensor}: "
                f"{_divisors(config.tensor)}"
            )
    if config.moe_a2a_backend not in ("none", "flashinfer") and config.expert != config.tensor:
        yield (
            f"{WHERE}.expert is {config.expert}, but moe_a2a_backend {config.moe_a2a_backend!r} has every expert on "
            f"one rank: it must equal {WHERE}.tensor, which is {config.tensor}"
        )
    if config.moe_a2a_backend != "none" and config.tensor == 1:
        yield f"{WHERE}.moe_a2a_backend is {config.moe_a2a_backend!r}, but with tensor 1 there is nobody to send to"
    if config.pipeline > 1 and config.attention_data > 1:
        yield f"{WHERE}.pipeline is {config.pipeline}, but must be 1 where attention_data is above 1"


def _combination_faults(config: SglangServerConfig, returns_routes: bool) -> Iterator[str]:
    if config.eplb and config.expert == 1:
        yield f"{WHERE}.eplb is True, but {WHERE}.expert is 1: there is nothing to balance; use 2 or more"
    if config.redundant_experts and not config.eplb:
        yield f"{WHERE}.redundant_experts is {config.redundant_experts}, but must be 0 where eplb is False"
    if config.weights_cpu_backup and not config.memory_saver:
        yield f"{WHERE}.weights_cpu_backup is True, but nothing is released without {WHERE}.memory_saver"
    if config.hierarchical_cache and not config.radix_cache:
        yield f"{WHERE}.hierarchical_cache is True, but needs {WHERE}.radix_cache"
    exact = config.deterministic or config.on_policy_target != "none"
    if exact and config.attention_backend not in DETERMINISTIC_BACKENDS:
        yield (
            f"{WHERE}.attention_backend is {config.attention_backend!r}, but deterministic numerics need one of "
            f"{', '.join(DETERMINISTIC_BACKENDS)}"
        )
    if config.deepep_mode != "auto" and config.moe_a2a_backend not in ("deepep", "mori"):
        yield f"{WHERE}.deepep_mode is {config.deepep_mode!r}, but moe_a2a_backend is {config.moe_a2a_backend!r}"


def _cpu_faults(config: SglangServerConfig) -> Iterator[str]:
    allowed: dict[str, Collection[Any]] = {
        "moe_a2a_backend": ("none",),
        "moe_runner_backend": ("auto",),
        "eplb": (False,),
        "attention_data": (1,),
        "pipeline": (1,),
        "quantization": ("none",),
        "kv_cache_dtype": ("auto",),
        "fp8_gemm_backend": ("auto",),
        "memory_saver": (False,),
        "deterministic": (False,),
        "on_policy_target": ("none",),
        "hierarchical_cache": (False,),
        "attention_backend": ("auto", "torch_native"),
    }
    for name, values in allowed.items():
        value = getattr(config, name)
        if value not in values:
            words = " or ".join(repr(word) for word in values)
            yield f"{WHERE}.{name} is {value!r}, but must be {words} on a CPU: it needs a GPU"


def _extra_faults(config: SglangServerConfig, returns_routes: bool) -> Iterator[str]:
    fields_of = {flag: name for table in (FLAGS, SWITCHES, SWITCHED_OFF) for name, flag in table.items()} | ALIASES
    for argument in config.extra_args:
        flag = argument.split("=", 1)[0].replace("_", "-")
        if not flag.startswith("--"):
            continue
        # argparse takes the beginning of a word for the word
        field_name = fields_of.get(flag) or next((fields_of[word] for word in fields_of if word.startswith(flag)), None)
        if any(word.startswith(flag) for word in OURS):
            yield f"{WHERE}.extra_args has {flag}, which moerl sets itself; remove it"
        elif field_name:
            yield f"{WHERE}.extra_args has {flag}; set {WHERE}.{field_name} instead"
        elif returns_routes:
            for reason in (reason for word, reason in NOT_WITH_ROUTES.items() if word.startswith(flag)):
                yield f"{WHERE}.extra_args has {flag}, but with routes (R3) it must not: {reason}"
        if config.memory_saver and DRAFT.startswith(flag):
            yield f"{WHERE}.extra_args has {flag}, but with {WHERE}.memory_saver it must not: {LOST_DRAFT}"


def _divisors(number: int) -> str:
    return ", ".join(str(value) for value in range(1, number + 1) if number % value == 0)


FLAGS = {
    "tensor": "--tp-size",
    "expert": "--ep-size",
    "attention_data": "--attn-dp-size",
    "pipeline": "--pp-size",
    "dense_tensor": "--moe-dense-tp-size",
    "moe_a2a_backend": "--moe-a2a-backend",
    "deepep_mode": "--deepep-mode",
    "deepep_dispatch_dtype": "--deepep-dispatcher-output-dtype",
    "moe_runner_backend": "--moe-runner-backend",
    "redundant_experts": "--ep-num-redundant-experts",
    "eplb_interval_iterations": "--eplb-rebalance-num-iterations",
    "eplb_dispatch": "--ep-dispatch-algorithm",
    "dtype": "--dtype",
    "quantization": "--quantization",
    "fp8_gemm_backend": "--fp8-gemm-backend",
    "kv_cache_dtype": "--kv-cache-dtype",
    "attention_backend": "--attention-backend",
    "on_policy_target": "--rl-on-policy-target",
    "max_total_tokens": "--max-total-tokens",
    "max_running_requests": "--max-running-requests",
    "max_queued_requests": "--max-queued-requests",
    "memory_fraction": "--mem-fraction-static",
    "chunked_prefill_tokens": "--chunked-prefill-size",
    "context_tokens": "--context-length",
    "sampling_mask_max_tokens": "--sampling-mask-max-tokens",
    "seed": "--random-seed",
    "log_level": "--log-level",
    "watchdog_seconds": "--watchdog-timeout",
}
"""Field -> argument with a value; left out where the value is the field's default."""
SWITCHES = {
    "eplb": "--enable-eplb",
    "fp32_head": "--enable-fp32-lm-head",
    "deterministic": "--enable-deterministic-inference",
    "memory_saver": "--enable-memory-saver",
    "weights_cpu_backup": "--enable-weights-cpu-backup",
    "hierarchical_cache": "--enable-hierarchical-cache",
    "metrics": "--enable-metrics",
}
"""Field -> argument that turns it on."""
SWITCHED_OFF = {
    "radix_cache": "--disable-radix-cache",
    "overlap_schedule": "--disable-overlap-schedule",
    "cuda_graph": "--disable-cuda-graph",
}
"""Field -> argument that turns it off."""
ALIASES = {
    "--tensor-parallel-size": "tensor",
    "--expert-parallel-size": "expert",
    "--ep": "expert",
    "--attention-data-parallel-size": "attention_data",
    "--enable-dp-attention": "attention_data",
    "--pipeline-parallel-size": "pipeline",
    "--dp-size": "num_servers",
    "--data-parallel-size": "num_servers",
}
"""Other spellings -> field."""
ALWAYS = ("log_level", "watchdog_seconds")
"""Said also where they are the default, which is not SGLang's."""


def arguments(
    config: SglangServerConfig, *, model_path: str, port: int, index: int, device: str, returns_routes: bool
) -> list[str]:
    """What follows `python -m sglang.launch_server` for server `index`; no key is in it.

    Args:
        config: checked.
        model_path: Hugging Face folder.
        port: to listen on.
        index: of the server on this node.
        device: of `device_of`.
        returns_routes: whether completions shall carry the experts of their tokens.
    """
    line = ["--model-path", model_path, "--host", config.host, "--port", str(port), "--device", device]
    # SGLang's own warm-up is a text, which a small tokenizer may lack the letters for; /health generates from an id.
    line += ["--log-level-http", "warning", "--skip-server-warmup"]
    defaults = {item.name: item.default for item in fields(config)}
    for name, flag in FLAGS.items():
        value = getattr(config, name)
        if name in ALWAYS or value != defaults[name]:
            line += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    line += [flag for name, flag in SWITCHES.items() if getattr(config, name)]
    line += [flag for name, flag in SWITCHED_OFF.items() if not getattr(config, name)]
    if returns_routes:
        line.append("--enable-return-routed-experts")
    if device == "cpu":
        line += _cpu_arguments(line)
    elif config.first_gpu or index:
        line += ["--base-gpu-id", str(config.first_gpu + index * config.tensor * config.pipeline)]
    return [*line, *config.extra_args]


def _cpu_arguments(line: list[str]) -> list[str]:
    needed = {
        "--attention-backend": ["torch_native"],
        "--max-total-tokens": [str(CPU_MAX_TOTAL_TOKENS)],
        "--disable-overlap-schedule": [],
    }
    return [word for flag, value in needed.items() if flag not in line for word in (flag, *value)]
