"""Composition of publishing: the engines' sender, the precision of what is sent, the publisher. Part of `build.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moerl.config.schema import RunConfig
from moerl.convert.precision import keeps_dtype
from moerl.errors import ConfigError
from moerl.models.family import family_of
from moerl.models.hf_folder import HFFolder, read_config
from moerl.protocols import RolloutEngine
from moerl.run_folder import ENGINE_WEIGHTS, versions_folder
from moerl.weight_sync.precision import SCALE, Precision
from moerl.weight_sync.publisher import Publisher
from moerl.weight_sync.servers import SenderPlace
from moerl.weight_sync.transport import WeightTransport, transports

_BLOCK = [128, 128]


def weight_sender(cfg: RunConfig, place: Path | None = None) -> Any:
    """What brings buckets to an engine's servers, as `weight_sync.transport` says.

    `place` is where what is on its way lies; None: `weight_sync.folder`, or else the run's folder.

    Raises:
        ConfigError: the transport has none, or the precision does not fit the model's folder.
    """
    plugin, transport_cfg = transports.resolve(cfg.weight_sync.transport, where="weight_sync.transport")
    if "sender" not in plugin.traits:
        raise ConfigError(
            f"weight_sync.transport={plugin.name} reaches no server of rollout.engine={cfg.rollout.engine['name']}; "
            "set it to disk, tensor or distributed"
        )
    folder = versions_folder(cfg) if place is None else place / ENGINE_WEIGHTS
    return plugin.traits["sender"](transport_cfg, SenderPlace(folder, Path(cfg.model.path), _quantisation(cfg)))


def build_publisher(
    cfg: RunConfig, engines: Sequence[RolloutEngine], transport: WeightTransport, precision: Precision
) -> Publisher:
    """Every name of the family's rules must come, and no other."""
    hf = read_config(cfg.model.path)
    exported = {name for rule in family_of(hf, cfg.model.family).weight_rules(hf) for name in rule.hf_names}
    plugin = transports.get(cfg.weight_sync.transport["name"])
    return Publisher(
        engines,
        transport,
        cfg.weight_sync.bucket_bytes,
        expected_names=precision.names(exported),
        is_summed="sender" not in plugin.traits,
    )


def build_precision(cfg: RunConfig) -> Precision:
    """As `weight_sync.precision` says.

    Raises:
        ConfigError: FP8 blocks, but the model's folder has none.
    """
    if cfg.weight_sync.precision == "as_is":
        return Precision()
    hf = read_config(cfg.model.path)
    rules = family_of(hf, cfg.model.family).weight_rules(hf)
    kept = frozenset(name for rule in rules if keeps_dtype(rule) for name in rule.hf_names)
    if cfg.weight_sync.precision == "bf16":
        return Precision(True, kept)
    _quantisation(cfg)
    blocks = {name.removesuffix(SCALE) for name in HFFolder(cfg.model.path).names() if name.endswith(SCALE)}
    exported = {name for rule in rules for name in rule.hf_names}  # carried layers are stored, and never sent
    return Precision(True, kept, frozenset(blocks & exported))


def _quantisation(cfg: RunConfig) -> dict[str, Any] | None:
    """`quantization_config` of what is sent: that of the folder which the servers were started with."""
    if cfg.weight_sync.precision != "fp8_block":
        return None
    found = read_config(cfg.model.path).get("quantization_config") or {}
    if found.get("quant_method") != "fp8" or found.get("weight_block_size") != _BLOCK:
        raise ConfigError(
            f"weight_sync.precision is fp8_block, but {cfg.model.path}/config.json has no quantization_config of fp8 "
            "with weight_block_size [128, 128], so servers of it hold no such blocks; convert the folder to fp8, or "
            "use bf16"
        )
    return dict(found)
