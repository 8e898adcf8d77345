"""What the oracle computes with: sequences as plain lists, derivatives by the complex step, distances to kinks.

Nothing of the product is imported here or in any `oracle_*` file: they are the formulas, written a second time.
A logprob moved by i * STEP carries its derivative in the imaginary part through any analytic formula, exact to the
last digits and without subtraction; a stop-gradient is then the real part, and a choice looks at real parts alone.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

Number = float | complex
STEP = 1e-30
LIMIT = 20.0

MARGINS: list[float] = []
"""Distance to the kink at every choice since `margin` was last asked for."""


def margin() -> float:
    """The smallest distance to a kink since the last call."""
    smallest = min(MARGINS, default=math.inf)
    MARGINS.clear()
    return smallest


def above(a: Number, b: Number) -> bool:
    MARGINS.append(abs(a.real - b.real) / max(1.0, abs(b.real)))
    return a.real > b.real


def sg(z: Number) -> float:
    """Stop-gradient."""
    return z.real


def exp(z: Number) -> Number:
    return cmath.exp(z) if isinstance(z, complex) else math.exp(z)


def log(z: Number) -> Number:
    return cmath.log(z) if isinstance(z, complex) else math.log(z)


def held(z: Number, low: float = -LIMIT, high: float = LIMIT) -> Number:
    """Within [low, high]; on a bound the derivative is the free one, beyond it 0."""
    if above(z, high):
        return high
    return low if above(low, z) else z


def at_most(z: Number, high: float) -> Number:
    return high if above(z, high) else z


def at_least(z: Number, low: float) -> Number:
    return low if above(low, z) else z


def sigmoid(z: Number) -> Number:
    if z.real >= 0:
        return 1 / (1 + exp(-z))
    e = exp(z)
    return e / (1 + e)


def log_sigmoid(z: Number) -> Number:
    return -log(1 + exp(-z)) if z.real >= 0 else z - log(1 + exp(z))


@dataclass
class Seq:
    """One answer. Lists are as long as it has tokens; what is not live in them may be anything."""

    now: list[Number]
    old: list[float]
    roll: list[float]
    ref: list[float]
    teacher: list[float]
    gamma: list[float]
    entropy: list[float]
    values: list[float]
    top_now: list[list[float]]
    """Logprobs of the current policy on the rollout's likeliest tokens and the sampled one."""
    top_roll: list[list[float]]
    mask: list[bool]
    advantage: list[float]
    group: int
    rewards: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        return sum(self.mask)

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    def live(self) -> list[int]:
        """Tokens that train: under the mask, with logprobs of one's own that are finite."""
        return [t for t, on in enumerate(self.mask) if on and not math.isinf(self.now[t].real)]

    def usable(self, *, reads_roll: bool) -> list[int]:
        """Those that the policy term may look at."""
        return [t for t in self.live() if not reads_roll or math.isfinite(self.roll[t])]


Batch = list[Seq]


def derivative(loss: Callable[[Batch], Number], batch: Batch) -> list[list[float]]:
    """d loss / d now, one list a sequence."""
    gradient = []
    for i, s in enumerate(batch):
        row = []
        for t in range(len(s.now)):
            if not s.mask[t]:
                row.append(0.0)
                continue
            now: list[Number] = list(s.now)
            now[t] = complex(now[t].real, STEP)
            moved = loss([*batch[:i], replace(s, now=now), *batch[i + 1 :]])
            row.append(complex(moved).imag / STEP)
        gradient.append(row)
    return gradient
