"""Re-filtering: every so many steps, leave out the prompts whose pass rate since the last time is out of the band."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moerl.algorithms.pass_rate import PassRates
from moerl.config.schema import RefilterSection
from moerl.errors import CheckpointError
from moerl.metrics import Last, Metrics, Sum


class Refilter:
    """The prompts that are left out now; a function of the steps and pass rates alone, so that it resumes exactly."""

    def __init__(self, rule: RefilterSection) -> None:
        """`rule.every_steps` 0 never leaves anything out."""
        self._rule = rule
        self._left_out: dict[str, int] = {}
        """Prompt id -> for how many decisions it has been left out."""
        self._counted: dict[str, tuple[int, int]] = {}
        """Prompt id -> (answers, passed) at the last decision."""

    def keeps(self, prompt_id: str) -> bool:
        """Whether the prompt may be sampled."""
        return prompt_id not in self._left_out

    def at(self, step: int, rates: PassRates) -> Metrics:
        """Decide anew where `step` is a multiple of `every_steps`; call it once before each step samples.

        A prompt that was not sampled since the last decision stays as it is: kept, or left out until `return_after`.
        """
        every = self._rule.every_steps
        if not every:
            return {}
        metrics: Metrics = {}
        if step % every == 0:
            before = set(self._left_out)
            self._decide(rates)
            metrics["data/refilter_dropped"] = Sum(float(len(self._left_out.keys() - before)))
            metrics["data/refilter_returned"] = Sum(float(len(before - self._left_out.keys())))
        return metrics | {"data/refilter_left_out": Last(float(len(self._left_out)))}

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"left_out": dict(self._left_out), "counted": {name: list(two) for name, two in self._counted.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it.

        Raises:
            CheckpointError: not what `state_dict` returned.
        """
        try:
            self._left_out = {name: int(age) for name, age in state["left_out"].items()}
            self._counted = {name: (int(answers), int(passed)) for name, (answers, passed) in state["counted"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"data.refilter: its state is damaged ({error!r}); use another checkpoint") from error

    def _decide(self, rates: PassRates) -> None:
        for name, rate in rates.prompts.items():
            answers, passed = self._counted.get(name, (0, 0))
            if rate.answers > answers:
                share = (rate.passed - passed) / (rate.answers - answers)
                if not self._rule.low <= share <= self._rule.high:
                    self._left_out[name] = 0
            elif name in self._left_out:
                self._left_out[name] += 1
                if self._left_out[name] == self._rule.return_after:
                    del self._left_out[name]
            self._counted[name] = (rate.answers, rate.passed)
