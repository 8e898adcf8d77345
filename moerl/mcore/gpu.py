"""The GPU of this process: which one it is, how exact its products are, whose layers run on it.

Settled in one place, and what the driver reads from the environment before CUDA starts on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch

from moerl.config.schema import ParallelSection
from moerl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
BLACKWELL = 10
"""Major compute capability from which kernels need no single queue to overlap with exchanges."""
HALF_TYPES = (torch.bfloat16, torch.float16)


def own_device(environment: Mapping[str, str], count: int) -> int:
    """Which of the `count` GPUs that this process sees is its own.

    A launcher may show all of a node's GPUs to each process, or bind one to each and show only that.

    Raises:
        ConfigError: more processes on this machine than GPUs.
    """
    local = int(environment["LOCAL_RANK"])
    if local < count:
        return local
    visible = environment.get(VISIBLE, "")
    named = [name for name in visible.split(",") if name.strip()]
    if count == 1 and len(named) == 1 and int(environment.get("LOCAL_WORLD_SIZE", "1")) > 1:
        return 0  # where it is another process's too, NCCL says so ("Duplicate GPU detected") at the first exchange
    raise ConfigError(
        f"local rank {local} has no GPU: this machine shows {count} ({VISIBLE} is {visible or 'not set'}); start at "
        f"most {count} processes a node (--nproc-per-node), or show more GPUs"
    )


def queue_in_order(section: ParallelSection, environment: MutableMapping[str, str], capability: int) -> None:
    """Before CUDA starts on the device: one queue, where megatron hides exchanges behind products by launch order.

    The exchange of a tensor or context axis must start before the product that it overlaps with, which GPUs before
    Blackwell (`capability` is the major number) keep to with a single queue alone. Whoever has set it keeps it.
    """
    if capability < BLACKWELL and (section.tensor > 1 or section.context > 1):
        environment.setdefault(CONNECTIONS, "1")


def keep_groups_apart(environment: MutableMapping[str, str]) -> None:
    """Before the first group of NCCL: no group's failure ends the process by way of the first one.

    A failure in any group of a process asks the monitor of the first for torch's flight record, and that monitor ends
    the process some minutes later, though the failure was of the group of weight updates and has been dealt with. What
    fails in the learner's own groups ends it all the same. Whoever wants the records has set it.
    """
    environment.setdefault(DUMP_ON_TIMEOUT, "0")


def keep_float32_exact() -> None:
    """Products of float32 factors in float32: NVIDIA's containers set an environment in which torch takes TF32."""
    torch.set_float32_matmul_precision("highest")


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """Whether a model with parameters of `dtype` has TransformerEngine's layers: with CUDA, TE, and half precision.

    In float32 they are neither exact nor lean: TE's products of float32 round factors to TF32, and of its attention
    only the one that makes all scores of a padded batch is left, which knows no context axis.
    """
    return dtype in HALF_TYPES and has_transformer_engine()


def has_transformer_engine() -> bool:
    """Whether CUDA is there and TransformerEngine is installed."""
    if not torch.cuda.is_available():
        return False
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)
