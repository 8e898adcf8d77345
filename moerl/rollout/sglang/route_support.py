"""With which settings SGLang 0.5.23 returns the routes of the tokens that it was asked about, and with which others'.

It notes routes where it chooses experts itself, copies its notes by token after every pass and never clears them: what
was not noted is zeros at first and another pass's routes later, which no look at the answer can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moerl.errors import RolloutError

if TYPE_CHECKING:
    from moerl.rollout.sglang.arguments import SglangServerConfig
    from moerl.rollout.sglang.client import ServerInfo

RUNNERS_WITHOUT_ROUTES = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4", "triton_kernel")
"""They choose experts inside their kernels, where nothing is noted."""
NOT_WITH_ROUTES = {
    "--speculative-algorithm": "its draft model's router is captured in the place of layer 0's in some versions",
    "--enable-hicache": "the routes of a prefix that comes back from the host tier are stale",
    "--enable-lmcache": "the routes of a prefix that comes back from LMCache are stale",
    "--enable-flexkv": "the routes of a prefix that comes back from FlexKV are stale",
    "--radix-cache-backend": "the routes of a prefix that comes back from a cache of its own may be stale",
    "--disaggregation-mode": "a server that takes over a prefix from another has no routes of it",
}
"""Arguments of no field -> why a server that returns routes must not have them."""
_TIERS = ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv")
"""What a server says of caches outside the device: keys and values come back from there, routes do not."""
EXCHANGES_WITH_ROUTES = ("none", "deepep", "deepep_v2")
"""All-to-all backends whose slices of tokens are gathered again for the notes."""


def route_faults(config: SglangServerConfig, where: str) -> Iterator[str]:
    """What a server that returns routes must not be started with; `where` the configuration stands."""
    if config.hierarchical_cache:
        yield (
            f"{where}.hierarchical_cache is True, but must be False where routes are replayed (R3): those of a prefix "
            "that comes back from the host tier are stale"
        )
    if config.moe_runner_backend in RUNNERS_WITHOUT_ROUTES:
        yield (
            f"{where}.moe_runner_backend is {config.moe_runner_backend!r}, which chooses experts inside its kernel and "
            "returns no routes of its own (R3); use triton"
        )
    if config.moe_a2a_backend not in EXCHANGES_WITH_ROUTES:
        yield (
            f"{where}.moe_a2a_backend is {config.moe_a2a_backend!r}, with which SGLang returns the routes of a part of "
            f"the tokens (R3); use one of {', '.join(EXCHANGES_WITH_ROUTES)}"
        )
    if config.pipeline > 1:
        yield (
            f"{where}.pipeline is {config.pipeline}, but must be 1 where routes are replayed (R3): only the first "
            "stage's layers come back"
        )


def refuse_without_routes(url: str, info: ServerInfo) -> None:
    """As `route_faults`, of a server that runs: `info` has what SGLang made of `auto`, which depends on the device.

    Raises:
        RolloutError: it returns no routes, or not those of its tokens; says what to start it with.
    """
    if not info.returns_routes:
        raise RolloutError(
            f"{url} was started without --enable-return-routed-experts, but routes are needed (R3); "
            "start it with that flag, or choose another algorithm.routing"
        )
    runner, exchange = info.values.get("moe_runner_backend"), info.values.get("moe_a2a_backend")
    if runner in RUNNERS_WITHOUT_ROUTES:
        raise RolloutError(
            f"{url} has the MoE runner {runner}, which chooses experts inside its kernel: SGLang would return zeros or "
            "another pass's routes (R3); start it with --moe-runner-backend triton "
            "(rollout.engine.servers.moe_runner_backend), or choose another algorithm.routing"
        )
    if exchange is not None and exchange not in EXCHANGES_WITH_ROUTES:
        raise RolloutError(
            f"{url} has --moe-a2a-backend {exchange}, with which SGLang returns the routes of a part of the tokens "
            f"(R3); start it with one of {', '.join(EXCHANGES_WITH_ROUTES)}"
        )
    for flag in (f"--{name.replace('_', '-')}" for name in _TIERS if info.values.get(name) is True):
        raise RolloutError(
            f"{url} has {flag}: the routes of a prefix that comes back from the host tier are stale (R3); start it "
            "without"
        )
    for name, plain in (("radix_cache_backend", None), ("disaggregation_mode", "null")):
        flag, value = f"--{name.replace('_', '-')}", info.values.get(name)
        if value not in (None, plain):
            raise RolloutError(f"{url} has {flag} {value}: {NOT_WITH_ROUTES[flag]} (R3); start it without")
    if (algorithm := info.values.get("speculative_algorithm")) is not None:
        raise RolloutError(
            f"{url} has --speculative-algorithm {algorithm}, whose draft model's router may be noted in the place of "
            "layer 0's (R3); start it without"
        )
    if num_stages(info) > 1:
        raise RolloutError(
            f"{url} has --pp-size {num_stages(info)}, but only the first stage's routes come back (R3); start it with "
            "--pp-size 1"
        )


def num_stages(info: ServerInfo) -> int:
    """Pipeline stages of a server; 1 where it does not say."""
    stages = info.values.get("pp_size")
    return stages if isinstance(stages, int) else 1
