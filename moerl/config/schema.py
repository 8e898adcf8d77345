"""Every configuration key, typed. `None` means off; automatic values are the word `auto` and are printed once resolved.

A field marked `plugin(kind)` is a node `{name: ..., **arguments}` (the bare name is short for it) that is checked
against the dataclass registered under that name; when an overlay changes `name`, the whole node is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from moerl.config.models import CriticSection, ReferenceSection, TeacherSection
from moerl.config.parallel import ParallelSection, PrecisionSection
from moerl.config.records import TelemetrySection


def plugin(kind: str, name: str | None = None, **arguments: Any) -> Any:
    """A field that holds one plugin node of `kind`, by default `{name: name, **arguments}`."""
    node = {"name": name, **arguments} if name else {}
    return field(default_factory=lambda: dict(node), metadata={"plugin": kind})


def plugins(kind: str) -> Any:
    """A field that holds a list of plugin nodes of `kind`, empty by default."""
    return field(default_factory=list, metadata={"plugins": kind})


@dataclass
class RunSection:
    """Identity and length of the run."""

    name: str = MISSING
    """Folder name under `output_dir`."""
    seed: int = 0
    num_steps: int = MISSING
    """Batches of rollouts to train on."""
    output_dir: str = "runs"
    resume: str = "auto"
    """`auto`: go on from the last complete checkpoint where there is one; `required`: fail without one; `never`: start
    anew, an existing run folder is set aside, never deleted."""
    num_threads: int = 1
    """torch's threads per process; two on a busy two-core machine are many times slower than one."""


@dataclass
class ModelSection:
    """The policy."""

    path: str = MISSING
    """Local Hugging Face folder (config.json, *.safetensors, tokenizer), or what `moerl convert import` made."""
    family: str = "auto"
    """`auto`: from the architecture in config.json."""
    init: str = "weights"
    """`weights`: load them; `random`: fresh weights from `run.seed`, for a folder that has only config and
    tokenizer."""
    freeze: list[str] = field(default_factory=list)
    """Regular expressions of Hugging Face names that are not trained."""
    aux_loss_coefficient: float = 0.0
    """Load-balancing loss of the routers."""
    router_bias_update_rate: float = 0.0
    """By how much the balancing bias of sigmoid routers moves at each optimizer step (pretraining takes 1e-3). 0 holds
    it, which is what reinforcement learning wants: engines choose by the bias that was published."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0


@dataclass
class DatasetConfig:
    """One named set of prompts."""

    name: str = MISSING
    source: dict[str, Any] = plugin("prompt source", "file")
    """`{name: file, path: x.jsonl}` (or .jsonl.gz, .parquet), `{name: reasoning_gym, task: ..., size: ..., seed: ...}`
    or `{name: verifiers, taskset: ...}`."""
    weight: float = 1.0
    """Share of this set in a mixture."""
    limit: int | None = None
    """Use the first so many prompts."""


@dataclass
class RefilterSection:
    """Prompts to leave out for being too hard or too easy, decided anew every so many steps from their pass rates."""

    every_steps: int = 0
    """At the start of every step that is a multiple of it; 0 is off. Between, the choice stands."""
    low: float = 0.05
    """Prompts whose pass rate since the last time (or, where they were not sampled, at it) is below are left out."""
    high: float = 0.95
    """And those above."""
    return_after: int | None = None
    """After so many times a prompt that was left out is sampled again; null never."""


@dataclass
class DataSection:
    """Prompts to train on."""

    train: list[DatasetConfig] = field(default_factory=list)
    shuffle: bool = True
    max_prompt_tokens: int = 1024
    on_long_prompt: str = "skip"
    """`skip` (and count) or `refuse` a prompt above the limit."""
    template: dict[str, Any] = plugin("prompt template", "auto")
    """What stands around each task, in training and in evaluation: `none`, `chat` (the tokenizer's own; `system` adds a
    message), `r1`, `qwen_math`, or `auto`: chat for `messages` rows and where the tokenizer has a chat template, else
    none."""
    check_disjoint: bool = True
    """Refuse to start when a held-out prompt is also a training prompt."""
    refilter: RefilterSection = field(default_factory=RefilterSection)


@dataclass
class RolloutSection:
    """Generation of experience."""

    engine: dict[str, Any] = plugin("rollout engine", "local")
    """`local` (on the processor in float32: small models), `sglang`, or `dataset` (a file's own completions)."""
    environment: dict[str, Any] = plugin("environment", "single_turn")
    prompts_per_step: int = 16
    group_size: int = 8
    max_new_tokens: int = 512
    """Of one episode, after the prompt; answers of tools count."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    top_logprobs: int = 20
    """Likeliest tokens whose logprobs the engine returns at each step, where the objective compares them."""
    stop: list[str] = field(default_factory=list)
    """Stop strings, beside the end tokens of the generation config."""
    max_staleness: int = 0
    """How many versions older than the policy that trains a token may be. 0 is strictly on-policy: a step samples, then
    trains. n: generation goes on while steps train, up to n steps ahead."""
    oversampling: float = 1.0
    """Groups that are started for each one that a step trains on; the rest make up for what filters drop and for late
    ones. What is left over is dropped once it is too old. Needs `max_staleness`."""
    long_tail: str = "wait"
    """Groups that take long, with `max_staleness`: `wait` for them, so that steps train in the order of the prompts;
    `resume`: train on what is finished and let them go on over updates (an engine that aborts at an update is asked to
    continue), to be waited for only when they would become too old; `drop` them then, and count them."""
    timeout_seconds: float = 600.0
    """Of one episode; a late one becomes a trajectory with status `error`. It runs from when the engine has a place for
    it, and not while no server is fit."""


@dataclass
class RewardSection:
    """What an answer is worth: the weighted sum of `rewards`."""

    rewards: list[dict[str, Any]] = plugins("reward")
    """Nodes such as `{name: math_verify, weight: 1.0, datasets: [sum]}`; without `datasets` a reward applies to all."""
    num_workers: int = 1
    """Sandboxed verifier processes."""
    timeout_seconds: float = 5.0
    """Of one verdict, counted from when a worker starts on it."""
    memory_bytes: int = 2_000_000_000
    """Address-space limit of a worker."""
    max_error_fraction: float = 0.1
    """Stop the run when more than this share of a step's trajectories could not be scored."""


@dataclass
class AdvantageSection:
    """A = post(transform((R - center) / (scale + eps))); docs/algorithms.md has the whole space."""

    center: str = "group_mean"
    """`none`, `group_mean`, `group_loo`, `batch_mean`, `history` (DCPO's statistics of the prompt, with transform
    `sas`), `value` (GAE on the values of `algorithm.critic`)."""
    scale: str = "group_std"
    """`none`, `group_std`, `batch_std_raw`, `batch_std_centered`."""
    std_ddof: int = 0
    eps: float = 1e-6
    singleton: str = "zero"
    """A group of one: `zero` advantage or the `raw` reward."""
    gamma: float = 1.0
    """Discount per token, with center `value`."""
    gae_lambda: float = 0.95
    """With center `value`: 0 trusts the critic, 1 the return."""
    gae_alpha: float | None = None
    """With center `value`: lambda is 1 - 1 / (gae_alpha * tokens of the answer), at least 0, in place of `gae_lambda`
    (VAPO, arXiv 2504.05118, which takes 0.05)."""
    transform: dict[str, Any] = plugin("advantage transform", "identity")
    post: dict[str, Any] = plugin("advantage post", "none")


@dataclass
class KLSection:
    """KL to the frozen reference policy."""

    place: str = "none"
    """`none`, `loss`, or `reward`: -coefficient * k1 at the old policy is part of each token's reward where the
    advantage has neither center nor scale, and of the answer's reward elsewhere."""
    estimator: str = "k3"
    """`k1`, `k2`, `k3`; only k1 in the reward."""
    coefficient: float = 0.0
    target: float | None = None
    """Adapt the coefficient after every step by 1 + 0.1 clip(KL / target - 1, -0.2, 0.2); None holds it."""
    importance: bool = False
    """Multiply by the token ratio (DeepSeek-V3.2's unbiased estimator)."""
    straight_through: bool = False
    """Value of `estimator`, gradient of k2."""
    force: bool = False
    """Take k1 in the loss all the same, although its expected gradient is 0."""


@dataclass
class EntropySection:
    """Entropy bonus."""

    place: str = "none"
    """`none`, `loss`, or `reward`: coefficient * entropy of the old policy, detached, is part of each token's
    advantage; with a critic of its reward, which later advantages tell of too."""
    coefficient: float = 0.0
    target: float | None = None
    """Skywork-OR1's control (arXiv 2505.22312): after every step the coefficient moves by `step`, up where the entropy
    is at most `target`; it is applied only while it is. None holds the coefficient."""
    step: float = 0.005


@dataclass
class PositiveNLLSection:
    """Mean negative logprob of the minibatch's good answers (VAPO, arXiv 2504.05118)."""

    coefficient: float = 0.0
    threshold: float = 0.0
    """Task rewards above it are good."""


@dataclass
class TermAggregationSection:
    """Aggregation of the other terms of the loss; `same` as `algorithm.aggregation`."""

    kl: dict[str, Any] = plugin("aggregation", "same")
    entropy: dict[str, Any] = plugin("aggregation", "same")
    value: dict[str, Any] = plugin("aggregation", "same")
    nll: dict[str, Any] = plugin("aggregation", "token_mean")
    """Over the good answers alone."""


@dataclass
class RouterShiftSection:
    """RSPO's router-shift factor (arXiv 2510.23027); composes with every `routing`."""

    enabled: bool = False
    stage: str = "before_clip"
    """`before_clip` (v2) or `after_clip` (v1, with level geo_clip)."""
    gamma_min: float = 0.8


@dataclass
class AlgorithmSection:
    """The objective as a point of one space; `preset` fills the axes, every one of which can be overridden."""

    preset: str | None = None
    """A name of `moerl objective --list`; what YAML files and overrides say of an axis wins over it."""
    objective: dict[str, Any] = plugin("objective", "policy_gradient")
    """`policy_gradient`, or what replaces it: `group_dpo`."""
    advantage: AdvantageSection = field(default_factory=AdvantageSection)
    anchor: str = "old"
    """Policy in the denominator of the ratio: `old` or `rollout`."""
    level: str = "token"
    """Importance-ratio level: `none`, `token`, `seq_geo`, `seq_geo_token`, `seq_prod`, `geo_clip`, `prefix_prod`,
    `prefix_min`."""
    form: str = "ratio"
    """`ratio`: gradient through the ratio; `score`: detached weight times A times logprob."""
    trust: dict[str, Any] = plugin("trust region", "clip")
    aggregation: dict[str, Any] = plugin("aggregation", "seq_mean_token_mean")
    term_aggregation: TermAggregationSection = field(default_factory=TermAggregationSection)
    token_weight: dict[str, Any] = plugin("token weight", "one")
    schedule: dict[str, Any] = plugin("update schedule", "joint")
    """`joint`: one optimizer step per minibatch; `lopti`: rare tokens first, then the others."""
    correction: dict[str, Any] = plugin("correction", "none")
    routing: str = "none"
    """`none`, `R2`, `R3`, `frozen_router`, `frozen_router_bias`."""
    router_shift: RouterShiftSection = field(default_factory=RouterShiftSection)
    critic: CriticSection = field(default_factory=CriticSection)
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    kl: KLSection = field(default_factory=KLSection)
    entropy: EntropySection = field(default_factory=EntropySection)
    positive_nll: PositiveNLLSection = field(default_factory=PositiveNLLSection)
    shaping: list[dict[str, Any]] = plugins("shaping")
    filters: list[dict[str, Any]] = plugins("filter")
    refill_rounds: int = 0
    """How often groups that a filter dropped are sampled anew within a step; 0 trains on fewer groups."""


@dataclass
class OptimSection:
    """Optimizer and learning rate. Schedules count steps (batches of rollouts), not minibatches."""

    name: str = "adam"
    """`adam` (AdamW) or `sgd`."""
    lr: float = 1e-6
    min_lr_fraction: float = 0.0
    """Share of `lr` at the end of the decay."""
    warmup_steps: int = 0
    schedule: str = "constant"
    """After the warm-up: `constant`, `linear` or `cosine` decay to `min_lr_fraction`."""
    constant_steps: int = 0
    """Steps before the decay starts, warm-up included."""
    decay_steps: int | None = None
    """Update of the policy with which the decay ends; None: the last, `run.num_steps` less `critic.pretrain_steps`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float = 1.0
    """0 is off."""
    distributed: bool = False
    """Adam's state, and the float32 weights beside bf16 ones, are shared out over the data-parallel ranks."""
    cpu_offload: bool = False
    """Adam's state lies in the host's memory and is stepped there; needs a GPU and `distributed`."""


@dataclass
class BatchSection:
    """How a step's samples become optimizer steps."""

    num_minibatches: int = 1
    """Optimizer steps per pass over the rollout batch."""
    num_epochs: int = 1
    """Passes over the rollout batch."""
    max_tokens_per_microbatch: int = 16384
    """Of one packed forward, which must hold the longest sequence; lower it first where the learner lacks memory."""


@dataclass
class WeightSyncSection:
    """How weights reach the engines."""

    transport: dict[str, Any] = plugin("weight transport", "in_process")
    """`in_process` for engines of this process; for servers `disk`, `tensor` (same machine) or `distributed`."""
    bucket_bytes: int = 268_435_456
    precision: str = "as_is"
    """Of what servers are sent: `as_is` (the trainer's own), `bf16`, or `fp8_block` (as the FP8 folder they serve)."""
    folder: str = ""
    """Where versions are written for servers, which see it under the same path, each run's in a folder of its own;
    empty: in the run's folder."""


@dataclass
class CheckpointSection:
    """Saving and resuming."""

    interval_steps: int = 10
    """0: only at the end and on Ctrl-C."""
    keep: int = 2
    """Complete checkpoints to keep; the last good one is never deleted."""
    async_save: bool = False
    """Training goes on while a copy of its state is written; the next save waits for it."""
    on_corrupt: str = "refuse"
    """A damaged newest checkpoint: `refuse` to start, or use the `previous` one."""
    export_interval_steps: int = 0
    """Every so many steps, also write the weights as a Hugging Face folder, `<run>/exports/step_000010`; 0: never."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder, `<run>/hf`."""
    export_dtype: str = "fp32"
    """`fp32` or `bf16`, of `<run>/hf` and `<run>/exports`."""


@dataclass
class EvaluationSection:
    """Held-out evaluation, greedy and sampled."""

    sets: list[DatasetConfig] = field(default_factory=list)
    interval_steps: int = 10
    """0: only before the first and after the last step."""
    num_samples: int = 2
    """Sampled answers per prompt."""
    temperature: float = 1.0
    pass_at: list[int] = field(default_factory=lambda: [1])
    """The k of pass@k, each at most `num_samples`."""
    maj_at: list[int] = field(default_factory=list)
    """The k of maj@k, the accuracy of a majority vote, each at most `num_samples`."""
    best_of: list[int] = field(default_factory=list)
    """The k of best-of-k: the accuracy of the best of k answers by reward and by logprob, each at most
    `num_samples`."""


@dataclass
class RunConfig:
    """The whole configuration of `moerl train`."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    data: DataSection = field(default_factory=DataSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    reward: RewardSection = field(default_factory=RewardSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    optim: OptimSection = field(default_factory=OptimSection)
    batch: BatchSection = field(default_factory=BatchSection)
    weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)
