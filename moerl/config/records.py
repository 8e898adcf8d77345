"""Configuration of what is written down. Part of `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

REFLECTION_WORDS = (
    "recheck",
    "rethink",
    "reassess",
    "reevaluate",
    "re-evaluate",
    "reevaluation",
    "re-examine",
    "reexamine",
    "reconsider",
    "reanalyze",
    "double-check",
    "check again",
    "think again",
    "verify again",
    "go over the steps",
)
"""Of Understanding R1-Zero-Like Training (arXiv 2503.20783)."""


@dataclass
class WandbSection:
    """Optional wandb sink."""

    enabled: bool = False
    project: str = "moerl"
    entity: str | None = None
    mode: str = "offline"
    """`offline` or `online`."""


@dataclass
class ProfileSection:
    """Steps under torch's profiler: `<run>/profile_steps_..._rank_....json.gz`, a chrome trace of every rank."""

    start_step: int = 1
    num_steps: int = 0
    """0 is off. A trace of a step holds every operation of it: take one to three."""


@dataclass
class TelemetrySection:
    """What is written down."""

    progress: str = "auto"
    """`auto` (live display on a terminal, plain lines elsewhere), `live`, `plain` or `off`."""
    samples_per_step: int = 4
    """Rollouts written to samples.jsonl each step."""
    probe_prompts: int = 8
    """Held-out prompts whose answers at step 0 are the fixed probe of route drift (`route_probe/*`, `route_long/*`); 0
    is off."""
    contract_tolerance: float = 1e-5
    """How far trainer and engine may be apart before the first update, both in fp32: in the logprob of every token (an
    engine may allow itself more), and in the margin by which a route that differs was chosen."""
    ngrams: list[int] = field(default_factory=lambda: [2, 4])
    """The n of `rollout/distinct_n`: the share of distinct n-grams of tokens among those of a group's answers."""
    reflection_words: list[str] = field(default_factory=lambda: list(REFLECTION_WORDS))
    """Words and phrases counted in `rollout/reflection_*`; case does not matter."""
    trace_max_bytes: int = 33_554_432
    """Size of `<run>/trace.json`, what ran when in Chrome's trace format; a full one becomes `trace.1.json`. 0 is
    off."""
    dump_batches: bool = False
    """Write every step's batch to `<run>/batches/`, for inspect_batch and replay_step."""
    report: bool = True
    """Write report.html."""
    profile: ProfileSection = field(default_factory=ProfileSection)
    wandb: WandbSection = field(default_factory=WandbSection)
