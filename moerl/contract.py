"""The step-0 contract: before anything has moved, trainer and engine must agree. Checked in every run and reported.

At the first minibatch of a run's first step the weights are those that generated the data. So the ratio to the old
policy is 1, its KL 0 and no clip binds; and in fp32 every logprob of the trainer equals the engine's to 1e-5 and every
route on which they differ was a near tie. What follows from such a tie is not judged: `moerl.mcore.agreement`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from moerl.errors import NumericsError

logger = logging.getLogger(__name__)

EXPECTED_BAND = {"bf16": 0.1, "int8": 0.5, "fp8": 2.0, "int4": 10.0}
"""Largest |trainer - engine| logprob difference expected of a lower precision; beyond it, a warning."""


@dataclass(frozen=True)
class StepZeroContract:
    """What is known of the two sides."""

    learner_precision: str
    engine_precision: str
    tolerance: float = 1e-5
    """In fp32: of every token's logprob, of a ratio's distance from 1, and of the margin of a near tie."""
    engine_rounding: float = 0.0
    """Allowed of a token's logprob if it is more: how far an engine's own fp32 arithmetic may be off."""

    @property
    def is_exact(self) -> bool:
        """Both sides compute in fp32."""
        return self.learner_precision == "fp32" and self.engine_precision == "fp32"

    def check(self, values: Mapping[str, float]) -> dict[str, float]:
        """Check the metrics of a run's first step; returns what to report under `contract/`.

        Raises:
            NumericsError: fp32 on both sides, and they disagree; says by how much and where to look.
        """
        problems = []
        checks = (
            (
                "contract/logp_gap",
                max(self.tolerance, self.engine_rounding),
                "the trainer's logprobs differ from the engine's",
            ),
            ("contract/route_margin", self.tolerance, "routes differ that were no near tie"),
            ("contract/ratio_deviation", self.tolerance, "the first minibatch's ratio is not 1"),
            ("contract/clip_fraction", 0.0, "a clip binds in the first minibatch"),
        )
        for name, limit, meaning in checks:
            if name in values and not values[name] <= limit:
                problems.append(f"{meaning}: {name} = {values[name]:.3g}, allowed {limit:g}")
        if self.is_exact and problems:
            raise NumericsError(
                f"step-0 contract broken: {'; '.join(problems)}. The weights are those that made the data, so both "
                "sides must agree: look at temperature, stop tokens, the chat template and the weight update "
                "(telemetry.dump_batches=true, then tools/replay_step.py). Rounding alone, in a deep or wide model, "
                "stays within ten times the limit: raise telemetry.contract_tolerance for it"
            )
        if not self.is_exact:
            self._warn_beyond_band(values)
        return {"contract/holds": float(not problems)}

    def _warn_beyond_band(self, values: Mapping[str, float]) -> None:
        lowest = max(self.engine_precision, self.learner_precision, key=lambda name: EXPECTED_BAND.get(name, 0.0))
        band, seen = EXPECTED_BAND.get(lowest, 0.1), values.get("mm/logp_abs_max", 0.0)
        if not seen <= band:  # NaN too
            logger.warning(
                "trainer and engine logprobs differ by up to %.3g at step 0; %s usually stays within %.3g",
                seen,
                lowest,
                band,
            )
