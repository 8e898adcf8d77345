"""Names such as `gspo_r3` and `grpo+tis_seq`: a preset with modifiers; torch-free.

A modifier moves one axis of any preset it goes together with; what does not go together is refused like any axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moerl.algorithms.presets import PRESETS

_LEVELS = ("token", "seq", "geo")

MODIFIERS: Mapping[str, Mapping[str, Any]] = {
    **{f"tis_{level}": {"correction": {"name": "tis", "level": level, "cap": 2.0}} for level in _LEVELS},
    **{f"mis_{level}": {"correction": {"name": "mis", "level": level, "min": 0.5, "max": 2.0}} for level in _LEVELS},
    "r2": {"routing": "R2"},
    "r3": {"routing": "R3"},
    "frozen": {"routing": "frozen_router"},
    "rs": {"router_shift": {"enabled": True, "stage": "before_clip", "gamma_min": 0.8}},
}
"""By name: values laid over a preset's. `tis_*` and `mis_*` weigh, `rs` is the router shift."""


class PresetValues(Mapping[str, Mapping[str, Any]]):
    """Values of the algorithm section by the name of a preset, alone or with modifiers (`base+one+two`, `base_r3`).

    Iteration gives the presets alone.
    """

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if name in PRESETS:
            return PRESETS[name].values
        base, *modifiers = _parts(name)
        if base not in PRESETS or not modifiers or any(modifier not in MODIFIERS for modifier in modifiers):
            raise KeyError(name)
        values = dict(PRESETS[base].values)
        for modifier in modifiers:
            values.update(MODIFIERS[modifier])
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(PRESETS)

    def __len__(self) -> int:
        return len(PRESETS)


def _parts(name: str) -> list[str]:
    if "+" in name:
        return name.split("+")
    base, _, modifier = name.rpartition("_")
    return [base, modifier]
