"""Arguments of the engine of SGLang servers, and this node's servers as they say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moerl.errors import ConfigError
from moerl.rollout.engine import ServedModel

if TYPE_CHECKING:
    from moerl.rollout.sglang.servers import Among, SglangServers

PAUSE_MODES = ("abort", "retract", "in_place")
ROUTES = ("auto", "always", "never")


@dataclass(frozen=True)
class SglangEngineConfig:
    """Arguments of `rollout.engine: {name: sglang}`. Give `urls` of servers that run, or `servers` to launch some."""

    urls: list[str] = field(default_factory=list)
    """`http://host:port` of each."""
    key_file: str = ""
    """File with the key that attached servers ask for; readable by its owner alone."""
    servers: dict[str, Any] | None = None
    """Of `moerl.rollout.sglang.arguments.SglangServerConfig`: how many to launch on a node, and how."""
    precision: str = "bf16"
    """Of the servers' arithmetic; the step-0 contract is exact for fp32 only."""
    pause_mode: str = "abort"
    """What an update does to requests that run. `abort`: they end and are continued as new requests. `retract`: their
    cache is computed again by the new weights. `in_place`: they go on with the old cache. R3 needs `abort`."""
    routes: str = "auto"
    """Ask for routes: `auto` where the algorithm replays them (R3), `always`, or `never`."""
    requests_per_server: int = 256
    """At once; more wait in this process."""
    affinity_slack: int = 8
    """Requests more than the idlest lane that a prompt's own lane may have, for the sake of its prefix cache."""
    request_timeout_seconds: float = 1800.0
    num_retries: int = 5
    retry_wait_seconds: float = 0.25
    resume_aborted: bool = True
    """Continue what a server aborted, with its tokens and the budget that is left; otherwise the environment may."""
    control_timeout_seconds: float = 120.0
    update_timeout_seconds: float = 600.0
    release_memory: bool = False
    """Attached servers on the learner's devices give it the memory of weights and cache while it trains; they must have
    been started with --enable-memory-saver. Launched ones do so where `servers` has `memory_saver`."""
    health_seconds: float = 30.0
    """Between two health checks of a server."""
    no_server_seconds: float = 600.0
    """How long requests wait while no server is fit and none is being started."""

    def __post_init__(self) -> None:
        faults = []
        for name, allowed in (("pause_mode", PAUSE_MODES), ("routes", ROUTES)):
            if getattr(self, name) not in allowed:
                faults.append(
                    f"rollout.engine.{name} is {getattr(self, name)!r}, but must be one of {', '.join(allowed)}"
                )
        seconds = ("request_timeout", "control_timeout", "update_timeout", "health", "no_server")
        for name in ("requests_per_server", *(f"{name}_seconds" for name in seconds)):
            if not getattr(self, name) > 0:
                faults.append(f"rollout.engine.{name} is {getattr(self, name)}, but must be above 0")
        for name in ("affinity_slack", "num_retries", "retry_wait_seconds"):
            if getattr(self, name) < 0:
                faults.append(f"rollout.engine.{name} is {getattr(self, name)}, but must be 0 or more")
        longest = self.control_timeout_seconds + self.update_timeout_seconds
        if self.pause_mode != "abort" and self.request_timeout_seconds <= longest:
            faults.append(
                f"rollout.engine.request_timeout_seconds is {self.request_timeout_seconds:g}, but with pause_mode "
                f"{self.pause_mode!r} requests wait at the server while it is updated: it must be above "
                f"control_timeout_seconds + update_timeout_seconds, which is {longest:g}"
            )
        if faults:
            raise ConfigError(*faults)


def wants_routes(cfg: SglangEngineConfig, model: ServedModel) -> bool:
    """Whether completions shall carry the experts of their tokens."""
    return cfg.routes == "always" or (cfg.routes == "auto" and model.wants_routes)


def launched_here(cfg: SglangEngineConfig, model: ServedModel, version: int, among: Among | None) -> SglangServers:
    """This node's servers, not started; raises ConfigError as `SglangServers`."""
    from moerl.registry import build_dataclass
    from moerl.rollout.sglang.arguments import WHERE, SglangServerConfig
    from moerl.rollout.sglang.servers import SglangServers

    return SglangServers(
        build_dataclass(SglangServerConfig, cfg.servers or {}, where=WHERE),
        model_path=model.path,
        log_folder=model.run_folder,
        returns_routes=wants_routes(cfg, model),
        weight_version=version,
        among=among,
    )
