"""Makes sglang 0.5.23 serve on a CPU, where PyPI has no kernels for it. Only a server's own processes see this folder.

Python imports `sitecustomize` when it starts, and so do the scheduler processes that a server spawns. It acts where
`SGLANG_USE_CPU_ENGINE` is 1 (`moerl/rollout/sglang/servers.py` sets it for `device: cpu`) and torch finds no CUDA
device; everywhere else it does nothing. It replaces, and nothing else:

1. `sgl_kernel`, where it is not installed: a module whose functions raise, each naming itself. sglang imports names
   from it and calls none of them on a CPU.
2. `torch.library.register_fake` for names of `torchvision::`: PyPI's torchvision has no operators beside a CPU torch.
3. the allocator of host buffers for the device "cpu", which registers pages with a CUDA driver (routes need it).
4. the native MoE layer, for the id -1 that stands for an expert of another rank (expert parallelism needs it).

Every name that is replaced must exist, so another version fails loudly instead of running half patched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SGLANG_VERSION = "0.5.23"
"""The one version whose internals this was proven against."""

KERNELS = "sgl_kernel"
_POOL, _MOE = "sglang.srt.mem_cache.pool_host.common", "sglang.srt.layers.moe.fused_moe_native"


class ShimError(ImportError):
    """This sglang is not the one that the shim was made for."""


def _existing(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise ShimError(
            f"CPU shim: {getattr(owner, '__name__', owner)}.{name} does not exist; it was made for sglang "
            f"{SGLANG_VERSION}: run `make sglang`"
        )
    return getattr(owner, name)


def _before_torchvision() -> None:
    import torch

    original = _existing(torch.library, "register_fake")

    def register_fake(op: Any, func: Any = None, /, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return func if func is not None else lambda function: function
        return original(op, **options) if func is None else original(op, func, **options)

    torch.library.register_fake = register_fake


def _after_pool(module: types.ModuleType) -> None:
    def on_the_heap(dims: Any, dtype: Any, device: Any, *_args: Any, **_options: Any) -> Any:
        import torch

        return torch.empty(dims, dtype=dtype, device=device)

    _existing(module, "ALLOC_MEMORY_FUNCS")["cpu"] = on_the_heap


def _after_moe(module: types.ModuleType) -> None:
    original = _existing(module, "moe_forward_native")

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        """x [t, h], ids [t, k]: each pair of a token and an expert of this rank as a token of its own, with one expert.

        The sum over the others' experts is added where the ranks' outputs are summed.
        """
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        token, place = (ids >= 0).nonzero(as_tuple=True)
        if len(token) == ids.numel():
            return original(layer, x, topk_output, config)
        out = x.new_zeros(x.shape, dtype=weights.dtype)
        if len(token):
            pairs = topk_output._replace(topk_ids=ids[token, place, None], topk_weights=weights[token, place, None])
            out.index_add_(0, token, original(layer, x[token], pairs, config).to(out.dtype))
        return out.to(x.dtype)

    vars(module)["moe_forward_native"] = moe_forward_native


BEFORE: dict[str, Callable[[], None]] = {"torchvision": _before_torchvision}
AFTER: dict[str, Callable[[types.ModuleType], None]] = {_POOL: _after_pool, _MOE: _after_moe}


def check_sglang() -> None:
    """Once, when sglang is first imported: its version, and that the modules to be patched are there.

    Raises:
        ShimError: another version, or a module has moved; its patch would never have been applied.
    """
    version = importlib.metadata.version("sglang")
    if version != SGLANG_VERSION:
        raise ShimError(f"CPU shim: sglang is {version}, but it was made for {SGLANG_VERSION}: run `make sglang`")
    spec = importlib.machinery.PathFinder.find_spec("sglang")
    folder = Path(next(iter(spec.submodule_search_locations or [""])) if spec else "")
    for name in AFTER:
        path = folder.joinpath(*name.split(".")[1:]).with_suffix(".py")
        if not path.is_file():
            raise ShimError(f"CPU shim: sglang {version} has no module {name}; run `make sglang`")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class _Patcher(importlib.abc.MetaPathFinder):
    """Runs a patch when the module that it is for is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sglang":
            check_sglang()
        if fullname in BEFORE and not _has_cuda():
            BEFORE.pop(fullname)()
        if fullname not in AFTER or _has_cuda():
            return None
        patch = AFTER.pop(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            raise ShimError(f"CPU shim: {fullname} cannot be found")
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        vars(spec.loader)["exec_module"] = execute_and_patch
        return spec


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for kernels that are not installed; last in line, so an installed package comes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname == KERNELS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _KernelModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__version__"] = "0.4.10"


class _KernelModule(types.ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_args: Any, **_options: Any) -> Any:
            raise NotImplementedError(f"{KERNELS}.{name} was called on a CPU, where it does not exist")

        absent.__name__ = name
        return absent


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, _Patcher())
    sys.meta_path.append(_Kernels())
