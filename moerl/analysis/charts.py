"""Which charts a report has: a table of metric names, nothing of how they are drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

LAYER = "/layer_"
"""What comes before the number in the name of a metric of one layer: `route/expert_change/layer_007`."""

ANSWERS = "Answers and prompts"
"""Title of the section that has the pass-rate table too."""


@dataclass(frozen=True)
class Chart:
    """Several metrics over the steps, on one axis."""

    title: str
    note: str
    """One sentence: what it is and what is good."""
    names: tuple[str, ...]
    """Metric names or `fnmatch` patterns, in drawing order; metrics of one layer never match."""
    kind: Literal["line", "points", "stack"] = "line"
    """`line`: the values, with their running mean where there are many; `points`: marked, as they are seldom; `stack`:
    parts of a whole."""
    scale: Literal["linear", "log"] = "linear"
    smooth: bool = True
    excluded: tuple[str, ...] = ()
    """Patterns of what `names` takes in and does not belong here."""
    per_layer: bool = False
    """`names[0]` is the stem of one metric per layer."""

    def select(self, known: Iterable[str]) -> list[str]:
        """Names of `known` that belong here: by pattern, then by name."""
        if self.per_layer:
            return sorted(name for name in known if name.startswith(self.names[0] + LAYER))
        whole = sorted(name for name in known if LAYER not in name and not _matches(name, self.excluded))
        chosen: list[str] = []
        for pattern in self.names:
            chosen += [name for name in whole if fnmatchcase(name, pattern) and name not in chosen]
        return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    title: str
    note: str
    charts: tuple[Chart, ...]


def _drift(prefix: str, title: str, note: str) -> Chart:
    return Chart(title, note, tuple(f"{prefix}/{name}" for name in ("expert_change", "set_change", "any_layer")))


SECTIONS: tuple[Section, ...] = (
    Section(
        "Learning",
        "Thick lines are running means. Below each chart: first → last value, and least to most in brackets.",
        (
            Chart("Reward", "Mean task reward of the step's rollouts.", ("reward/mean",)),
            Chart(
                "Reward by component",
                "Mean raw value of every named reward, before its weight.",
                ("reward/*",),
                excluded=(
                    "reward/mean",
                    "reward/std",
                    "reward/min",
                    "reward/max",
                    "reward/group_*",
                    "reward/verifier_*",
                ),
            ),
            Chart(
                "Held-out accuracy",
                "Greedy and sampled answers to prompts that are never trained on; the sampled accuracy is pass@1.",
                ("eval/accuracy_greedy", "eval/accuracy_sampled", "eval/pass@*"),
                kind="points",
                excluded=("eval/pass@1",),
            ),
            Chart(
                "Votes and best of several",
                "Held-out accuracy of a majority vote over k answers, and of the best of k by reward or by how likely "
                "the policy found it.",
                ("eval/maj@*", "eval/best_by_*"),
                kind="points",
            ),
            Chart(
                "Held-out accuracy by set",
                "The same for every named evaluation set.",
                ("eval/*/accuracy_greedy", "eval/*/accuracy_sampled"),
                kind="points",
            ),
            Chart(
                "Response length",
                "Sampled tokens per rollout.",
                ("rollout/response_length", "rollout/response_length_max"),
            ),
            Chart(
                "Response length by verdict",
                "Sampled tokens of right and of wrong rollouts: wrong ones that grow alone are a bias of the loss.",
                ("rollout/response_length_right", "rollout/response_length_wrong"),
            ),
            Chart("Entropy", "Mean entropy of the policy in nats; near 0 it no longer explores.", ("pg/entropy",)),
            Chart("Truncated responses", "Share that ran into the token limit.", ("rollout/truncated_fraction",)),
            Chart(
                "Loss",
                "Supervised training: negative log-likelihood per token. RL: near 0, and no measure of progress.",
                ("loss", "pg/nll", "pg/loss"),
            ),
            Chart(
                "Groups without a signal",
                "Groups whose rollouts all got the same reward; nothing is learnt from them.",
                ("advantage/zero_variance_groups",),
            ),
            Chart(
                "Failures",
                "Rollouts that failed or could not be scored; they are left out, never counted as wrong.",
                ("rollout/errors", "rollout/aborted", "rollout/too_long", "reward/verifier_*"),
                smooth=False,
            ),
        ),
    ),
    Section(
        ANSWERS,
        "How much the answers to one prompt differ, and which prompts the policy solves.",
        (
            Chart(
                "Diversity",
                "Distinct n-grams of tokens by n-grams, and distinct answers by answers, within a group.",
                ("rollout/distinct_fraction", "rollout/distinct_*"),
            ),
            Chart(
                "Reward spread",
                "Standard deviation and range of the task reward within a group; 0 is nothing to learn from.",
                ("reward/group_std", "reward/group_range"),
            ),
            Chart("Certainty", "Mean probability of the chosen tokens, as sampled.", ("rollout/token_prob",)),
            Chart(
                "Reflection",
                "Share of answers with a reflection word, and such words per answer.",
                ("rollout/reflection_fraction", "rollout/reflection_words"),
            ),
            Chart(
                "Prompts never and always solved",
                "Share of the prompts sampled so far, each at its last visit.",
                ("data/never_passed_fraction", "data/always_passed_fraction"),
            ),
            Chart(
                "Prompts left out",
                "By data.refilter, until it decides anew.",
                ("data/refilter_left_out", "data/refilter_dropped", "data/refilter_returned"),
                smooth=False,
            ),
        ),
    ),
    Section(
        "Updates",
        "",
        (
            Chart(
                "Clip fraction",
                "Share of live tokens whose gradient a bound of the trust region zeroed.",
                ("pg/clip_low", "pg/clip_high", "pg/dual", "pg/clip_fraction"),
            ),
            Chart(
                "KL",
                "Distance of the current policy from the old one and from the reference.",
                ("pg/kl_old", "pg/kl*", "kl/*"),
            ),
            Chart(
                "Probability ratio",
                "Current by old policy, over tokens: 1 is no change.",
                ("pg/ratio_mean", "pg/ratio_max"),
            ),
            Chart("Gradient norm", "Before clipping.", ("optim/grad_norm",)),
            Chart("Learning rate", "", ("optim/lr",), smooth=False),
        ),
    ),
    Section(
        "Train / rollout mismatch",
        "Learner and rollout engine at the same weights, on the sampled tokens: 0 where their numerics are equal.",
        (
            Chart("KL estimate k3", "KL(rollout || learner).", ("mm/k3",), scale="log"),
            Chart(
                "Log-probability difference",
                "Mean and largest |learner - engine|, in nats.",
                ("mm/logp_abs_mean", "mm/logp_abs_max"),
                scale="log",
            ),
            Chart(
                "Extreme tokens",
                "Share of tokens whose probability ratio is beyond 1.5, 2, 5 or 10.",
                tuple(f"mm/extreme_{bound}" for bound in ("1.5", "2", "5", "10")),
            ),
            Chart(
                "Effective sample size", "1 where the importance weights are all equal.", ("mm/ess_token", "mm/ess_seq")
            ),
        ),
    ),
    Section(
        "Route drift",
        "How far two routings of the same tokens differ. expert_change: share of expert slots; set_change: share of "
        "(token, layer) pairs; any_layer: share of tokens with a change in some layer.",
        (
            _drift("route", "Rollout against learner", "Same weights, two engines: disagreement of the numerics."),
            _drift("route_update", "Over one step's updates", "The weights of the rollout against the current ones."),
            _drift("route_probe", "Over one step, on the fixed probe", "The same tokens at every step."),
            _drift("route_long", "Since the start, on the fixed probe", "Step 0 against now."),
            Chart("Drift per step, by layer", "", ("route_update/expert_change",), per_layer=True),
            Chart(
                "Router shift",
                "Raw router-shift factor of RSPO over tokens; 1 is no shift.",
                ("route_update/gamma_mean", "route_update/gamma_p10", "route_update/gamma_p01"),
            ),
        ),
    ),
    Section(
        "Expert load",
        "What share of a layer's assignments each expert gets, times the number of experts: 1 is an even share.",
        (
            Chart("Unevenness", "Standard deviation of the load by its mean, over experts.", ("load/cv",)),
            Chart("Busiest and idlest expert", "Load by an even share.", ("load/max", "load/min")),
            Chart(
                "Dead experts",
                "Experts without a single token (dead) and with under a tenth of an even share, per layer.",
                ("load/dead", "load/below_tenth"),
            ),
            Chart("Load drift", "Total variation against the step before and step 0.", ("load/drift_tv*",)),
        ),
    ),
    Section(
        "Cost",
        "",
        (
            Chart(
                "Seconds by phase",
                "Wall time of a step.",
                tuple(f"perf/{phase}_seconds" for phase in ("rollout", "score", "update", "publish", "*")),
                kind="stack",
            ),
            Chart("Tokens per second", "", ("perf/rollout_tokens_per_second", "perf/learn_tokens_per_second")),
            Chart(
                "Servers",
                "Requests that were sent again, late ones, aborted parts that went on; servers that left, came back or "
                "were started anew.",
                tuple(
                    f"engine/{name}"
                    for name in ("retries", "timeouts", "resumes", "ejections", "returns", "restarts", "fit_servers")
                ),
            ),
        ),
    ),
)
