"""Makes megatron-core run on CPU with gloo. The only patches in the package; a no-op where CUDA is there.

`install()` must run before megatron is imported. It replaces, and nothing else:

1. torch.cuda: the current device is the CPU, streams and events are inert, the RNG state is the CPU's;
2. the device name "cuda" in tensor factories, `Tensor.to` and `Tensor.cuda` means the CPU;
3. `Tensor.type()` spells CPU types the way megatron's optimizers compare them;
4. functions of megatron-core 0.19.2 that only GPUs satisfy (split sizes for gloo; a gather and a reduce-scatter of
   unequal shares, which gloo lacks; two loaders of the distributed optimizer that assume FusedAdam).

Every name that is replaced must exist, so a new version fails loudly instead of running half patched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from moerl.errors import ConfigError

MEGATRON_VERSION = "0.19.2"
"""The one version whose internals this package was proven against."""
OLDEST_ENGINE = (2, 20)
"""Of TransformerEngine: the first whose Adam counts the steps of a group that has no parameters on this rank."""

_CPU = torch.device("cpu")
_installed = False
_opened = False

_FACTORIES = [
    "tensor",
    "as_tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "randperm",
    "arange",
    "linspace",
    "eye",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "empty_strided",
]


class _Stream:
    """A CUDA stream where everything is already done."""

    cuda_stream = 0
    device = _CPU
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> bool:
        return False


class _Event:
    """A CUDA event that tells the wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) * 1e3


class _Generators:
    """`torch.cuda.default_generators` where every index is the CPU's generator."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter([torch.default_generator])


_STREAM = _Stream()


@contextlib.contextmanager
def _stream_context(stream: Any = None) -> Iterator[None]:
    yield


def _means_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`, which must exist."""
    if not hasattr(owner, name):
        raise ConfigError(
            f"cpu_backend: {getattr(owner, '__name__', owner)}.{name} does not exist in torch {torch.__version__} with "
            f"megatron-core {MEGATRON_VERSION}; install the versions that pyproject.toml pins"
        )
    setattr(owner, name, value)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
            if "pin_memory" in kwargs:
                kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _seed(seed: int) -> None:
    # torch.manual_seed calls torch.cuda.manual_seed_all: going through torch.manual_seed here would recurse for ever.
    torch.default_generator.manual_seed(seed)


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    inert: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "stream": _stream_context,
        "set_stream": lambda stream: None,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": _Generators(),
        "get_device_capability": lambda device=None: (0, 0),
        "memory_stats": lambda device=None: {},
        # On a CPU build lazy calls are queued and never run.
        "_lazy_call": lambda call, **kwargs: call(),
        "_lazy_init": lambda: None,
    }
    for counter in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        inert[counter] = lambda device=None: 0
    for name, value in inert.items():
        _replace(cuda, name, value)
    _replace(cuda.random, "get_rng_state", inert["get_rng_state"])
    _replace(cuda.random, "set_rng_state", inert["set_rng_state"])
    _replace(cuda.nvtx, "range_push", lambda message: 0)
    _replace(cuda.nvtx, "range_pop", lambda: 0)


def _patch_tensors() -> None:
    # `with torch.device(...)` looks factories up in a table of torch's functions that is made on first use: it must
    # hold the originals, or the context would no longer reach them (transformers loads models that way).
    _device_constructors()
    for name in _FACTORIES:
        _replace(torch, name, _on_cpu(getattr(torch, name)))
    tensor = torch.Tensor
    original_to, original_type = tensor.to, tensor.type

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _means_cuda(args[0]):
            args = (_CPU, *args[1:])
        if kwargs and _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(self, *args, **kwargs)

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original_type(self)
            return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_type(self, dtype, *args, **kwargs)

    _replace(tensor, "to", to)
    _replace(tensor, "type", type_)
    _replace(tensor, "cuda", lambda self, *args, **kwargs: self)
    _replace(tensor, "record_stream", lambda self, stream: None)
    _replace(tensor, "pin_memory", lambda self, *args, **kwargs: self)
    _replace(torch.nn.Module, "cuda", lambda self, *args, **kwargs: self)


def _patch_megatron() -> None:
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer

    def split_sizes_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Megatron converts to numpy only what is on a GPU; gloo takes integers, never tensors.
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    _replace(dispatcher, "maybe_move_tensor_to_cpu", split_sizes_to_host)

    # torch's AdamW keeps a per-parameter "step", FusedAdam does not, and megatron's loader assumes FusedAdam.
    for name in (
        "_set_main_param_and_optimizer_states",
        "sharded_state_dict",
        "_init_optimizer_states_with_dummy_values",
    ):
        if not hasattr(optimizer, name):
            raise ConfigError(
                f"cpu_backend: DistributedOptimizer.{name} does not exist; megatron-core must be {MEGATRON_VERSION}"
            )
    set_states, sharded_state_dict = optimizer._set_main_param_and_optimizer_states, optimizer.sharded_state_dict

    def set_main_param_and_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
        tensors.setdefault("step", None)
        return set_states(self, model_param, tensors)

    def sharded_state_dict_when_empty(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_loading = kwargs.get("is_loading") or (len(args) > 1 and args[1])
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded_state_dict(self, *args, **kwargs)

    _replace(optimizer, "_set_main_param_and_optimizer_states", set_main_param_and_states)
    _replace(optimizer, "sharded_state_dict", sharded_state_dict_when_empty)


def _patch_uneven_collectives() -> None:
    """Expert tensor parallelism gathers and scatters unequal shares; gloo knows equal ones only."""
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    for name in ("_gather_along_first_dim", "_reduce_scatter_along_first_dim"):
        if not hasattr(mappings, name):
            raise ConfigError(f"cpu_backend: mappings.{name} does not exist; megatron-core must be {MEGATRON_VERSION}")
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    dist = torch.distributed

    def gather_uneven(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        mine = input_.new_zeros((max(output_split_sizes), *input_.shape[1:]))
        mine[: len(input_)] = input_
        parts = [torch.empty_like(mine) for _ in output_split_sizes]
        dist.all_gather(parts, mine, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_uneven(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    _replace(mappings, "_gather_along_first_dim", gather_uneven)
    _replace(mappings, "_reduce_scatter_along_first_dim", reduce_scatter_uneven)


def check_megatron() -> None:
    """Say what is wrong with the installation before megatron dies of it.

    Raises:
        ConfigError: megatron-core is absent or of another version; TransformerEngine is there but does not import, or
            is too old; the `apex` that is importable is not NVIDIA's.
    """
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"megatron-core is not installed; run `make setup` (version {MEGATRON_VERSION} is needed)"
        ) from error
    if version.split("+")[0] != MEGATRON_VERSION:
        raise ConfigError(f"megatron-core is {version}, but {MEGATRON_VERSION} is needed; run `make setup`")
    if importlib.util.find_spec("transformer_engine") is not None:
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"transformer_engine is installed but does not import ({str(error).splitlines()[0]}); megatron-core "
                "cannot be imported beside it: install a build that matches this torch and CUDA, or uninstall it"
            ) from error
        _refuse_old_engine()
    if importlib.util.find_spec("apex") is not None and not _is_nvidia_apex():
        raise ConfigError(
            "the importable 'apex' is not NVIDIA's (PyPI's package of that name is an old web toolkit) and misleads "
            "megatron-core; uninstall it"
        )


def _refuse_old_engine() -> None:
    version = str(getattr(sys.modules["transformer_engine"], "__version__", "of an unknown version"))
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_ENGINE:
        raise ConfigError(
            f"transformer_engine is {version}, but 2.20 or later is needed: the Adam of earlier ones counts no steps "
            "where a rank has no parameters of a group, so that the first checkpoint after a resume would fail; "
            "install transformer_engine[pytorch]>=2.20, or uninstall it"
        )


def _is_nvidia_apex() -> bool:
    try:
        return importlib.util.find_spec("apex.multi_tensor_apply") is not None
    except ModuleNotFoundError:
        return False


def install() -> None:
    """Install the CPU backend once; nothing where CUDA is available.

    Raises:
        ConfigError: megatron was imported before, or a name to replace does not exist.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise ConfigError("megatron.core was imported before moerl.mcore; import moerl.mcore first")
    # jit_fuser is torch.compile at import time, which on a CPU compiles for longer than anything here runs.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _patch_torch_cuda()
    _patch_tensors()
    _patch_megatron()
    _patch_uneven_collectives()
    _installed = True


def open_gate() -> None:
    """Check the installation, install the CPU backend where it is needed, and quiet megatron's import-time notices."""
    global _opened
    if _opened:
        return
    check_megatron()
    # Notices ("GPTModel IS DEPRECATED", absent TE and apex) that a reader of moerl's log can do nothing about.
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    install()
    _opened = True
