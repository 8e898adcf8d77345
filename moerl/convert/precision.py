"""In which type a tensor is written: as asked, but for what decides over experts, which keeps its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from moerl.convert.building import num_not_finite
from moerl.errors import CheckpointError, ConfigError
from moerl.models.hf_folder import WeightSource
from moerl.models.rules import Rule
from moerl.shards import DTYPES

WORDS = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""What `--dtype` may be."""
FP8_BLOCK = "fp8-block"
FP8_TENSOR = "fp8-tensor"
"""What it may be of an export beside."""
REST_OF_FP8 = torch.bfloat16
"""Whatever is not FP8 then; routers and their biases keep their own type as ever."""
_CASTABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def keeps_dtype(rule: Rule) -> bool:
    """Routers and their correction biases: rounding them changes which experts a token goes to."""
    return rule.is_buffer or ".router." in rule.megatron_name


def written_dtype(rule: Rule, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Of a tensor of `rule`."""
    return stored if keeps_dtype(rule) else asked_dtype(stored, asked)


def asked_dtype(stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Of a tensor that is written as asked."""
    return stored if asked is None or stored not in _CASTABLE else asked


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`.

    Raises:
        CheckpointError: finite values are not finite in it.
    """
    if tensor.dtype == dtype:
        return tensor
    made = tensor.to(dtype)
    lost = num_not_finite(made) - num_not_finite(tensor)
    if lost:
        word = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{name}: {lost} of {tensor.numel()} values do not fit into {word} (largest {_largest(tensor):g}); choose "
            "a wider --dtype"
        )
    return made


def dtype_of(rule: Rule, source: WeightSource, asked: torch.dtype | None) -> torch.dtype:
    """The one type of all that makes up the parameter of `rule`.

    Raises:
        ConfigError: its tensors have several types, which one parameter cannot have.
    """
    found = {name: written_dtype(rule, source.dtype(name), asked) for name in rule.hf_names}
    if len(set(found.values())) > 1:
        _refuse_mixed(rule.megatron_name, found)
    return next(iter(found.values()))


def check_stacked(dtypes: Iterable[tuple[str, Rule, torch.dtype]]) -> None:
    """`dtypes`: (name of the stacked tensor, rule, type) of every parameter; experts of a layer are one tensor.

    Raises:
        ConfigError: one stacked tensor would have several types.
    """
    seen: dict[str, tuple[Rule, torch.dtype]] = {}
    for key, rule, dtype in dtypes:
        first, expected = seen.setdefault(key, (rule, dtype))
        if dtype != expected:
            _refuse_mixed(key, {first.hf_names[0]: expected, rule.hf_names[0]: dtype})


def check_written(dtypes: Mapping[str, torch.dtype]) -> None:
    """`dtypes`: parameter -> type that it would have in a sharded checkpoint.

    Raises:
        ConfigError: a type that no reader of one knows.
    """
    for name, dtype in dtypes.items():
        if dtype not in DTYPES.values():
            raise ConfigError(
                f"{name} would be written as {str(dtype).removeprefix('torch.')}; a sharded checkpoint has "
                f"{', '.join(DTYPES)} only, so choose one with --dtype"
            )


def _refuse_mixed(what: str, found: dict[str, torch.dtype]) -> None:
    listed = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in found.items())
    raise ConfigError(f"{what} would be made of several types ({listed}); say which it shall have with --dtype")


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0, 0, 0).max())
