"""Configuration of how the learner is laid out and in which number formats it computes. Part of `schema.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ParallelSection:
    """Sizes of the parallel axes; data parallelism is what remains of the world size."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, where the stages do not divide the model's (61, 47, 94); those without a
    number of their own share the rest evenly. None: as one of them."""
    last_stage_layers: int | None = None
    """Likewise of the last stage, which also holds the output layer."""
    context: int = 1
    context_cut: str = "auto"
    """How the context axis cuts a pack: `zigzag`, every sequence in twice as many chunks as it has ranks; `whole`, each
    sequence on one rank; or `auto`, sequences whole in packs that have fewer rows that way and more than 1 % filling in
    the zigzag. TransformerEngine's layers know the zigzag alone."""
    expert: int = 1
    expert_tensor: int = 1
    dispatcher: str = "alltoall"
    """How tokens reach their experts: `alltoall`, `allgather` (few ranks, small batches), or `flex` (DeepEP; needs a
    GPU and its library)."""
    overlap_grad_reduce: bool = False
    """Gradients are reduced over data-parallel ranks while the last micro-batch's backward still runs."""
    timeout_seconds: float = 1800.0
    """Longest that one exchange between ranks may take. What they wait while rank 0 samples or evaluates is not part of
    one."""
    silence_seconds: float = 60.0
    """A rank that gave no sign of life for so long is taken for lost, and the run ends."""


@dataclass
class PrecisionSection:
    """Number formats of the learner."""

    params: str = "fp32"
    """`fp32` or `bf16` (bf16 keeps fp32 main weights, and routers that are float32 in `model.path` as they are).
    TransformerEngine's layers, where it is installed, train bf16 alone; fp32 is exact everywhere, and slow on a GPU."""
    head: str = "params"
    """Format of the product that makes logits: `params`, which rounds logits to that format as an engine of it does,
    or `fp32`, with hidden states and output weights as float32 factors (MiniMax-M1, ScaleRL)."""
    fp8: str = "none"
    """There is no training in FP8: all but `none` is refused. FP8 folders are read, written and sent to servers."""
    recompute: str = "none"
    """`none`, `selective` (attention and experts) or `full` (every layer)."""
