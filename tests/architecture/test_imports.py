"""Who may import what, read from the source tree: one owner per dependency, no hidden configuration, no mocks.

The levels of the rooms are held by import-linter (`pyproject.toml`); this file catches what it cannot see.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OWNERS = {
    "megatron": ("moerl/mcore/",),
    "transformer_engine": ("moerl/mcore/",),
    "apex": ("moerl/mcore/",),
    "modelopt": ("moerl/convert/fp8_tensors.py",),
    "sglang": ("moerl/rollout/engines/sglang_engine.py",),
    "wandb": ("moerl/telemetry/sinks.py",),
    "omegaconf": ("moerl/config/load.py", "moerl/config/schema.py", "moerl/registry.py"),
    "torch.distributed": ("moerl/mcore/", "moerl/weight_sync/update_group.py"),
    "verifiers": ("moerl/rewards/verifiers.py", "moerl/data/sources/verifiers.py"),
    "math_verify": ("moerl/rewards/judges/",),
    "reasoning_gym": ("moerl/rewards/judges/", "moerl/data/sources/"),
}
"""Package -> the only places that may import it."""

BROAD_EXCEPT = {
    "moerl/rollout/collect.py::_episode": "an episode that fails becomes a trajectory with an error status",
    "moerl/telemetry/sinks.py::_each": "a sink that fails is dropped with a warning",
    "moerl/rewards/judges/program.py::_guarded": "whatever a stranger's program raises is how it failed",
    "moerl/rewards/judges/assertions.py::check": "a test says by raising that it failed",
    "moerl/rewards/verifiers.py::score": "a taskset's functions may raise anything; it is no verdict",
    "moerl/rewards/pool.py::_serve": "whatever keeps a task from a verdict is told to who waits for it",
    "moerl/rewards/worker.py::__call__": "whatever a verifier's module raises at import becomes an error verdict",
    "moerl/rewards/worker.py::_call_walled": "whatever a verifier raises in its sandbox becomes an error verdict",
    "moerl/data/chat.py::_encode": "the tokenizer's library raises the bare class, and this catches no other",
    "moerl/convert/fp8_tensors.py::_encoded": "as in chat.py",
}
"""The functions that catch `Exception` or more, and why: those that ARCHITECTURE.md, section 7, names."""

BROAD = {"Exception", "BaseException"}
ENVIRONMENT = {
    "moerl/world.py": "RANK, WORLD_SIZE and their like, which the launcher sets",
    "moerl/mcore/": "what torch, megatron and CUDA read at import or when they start",
    "moerl/rewards/": "the bare environment of sandboxed workers",
    "moerl/rollout/sglang/servers.py": "the environment of a server's process, without the trainer's own variables",
    "moerl/weight_sync/update_group.py": "what torch reads when it makes a group of NCCL, set for that moment alone",
    "moerl/rollout/sglang/shim/": "whether this is a server on a CPU",
}
"""Where `os.environ` may be touched, and what for: never for configuration."""

MODULES = {"torch", "os"}
"""Modules whose attributes count as imports: `torch.distributed` and `os.environ` need no import of their own."""

NO_DEVICE = ("moerl/algorithms/", "moerl/models/", "moerl/rewards/", "moerl/envs/", "moerl/data/packing.py")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Path -> parsed source of everything under moerl/."""
    files = sorted((ROOT / "moerl").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def imported(tree: ast.Module) -> set[str]:
    """Dotted names that a file imports anywhere, `from a import b` as both `a` and `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            names.add(f"{node.value.id}.{node.attr}")  # torch.distributed without an import of its own
    return names


def names_of(path: str, package: str) -> set[str]:
    return {name for name in imported(trees()[path]) if name == package or name.startswith(f"{package}.")}


def test_the_reader_sees_every_form_of_import():
    source = (
        "import a.b\nfrom c import d\ndef f():\n    import e\n    from f.g import h\n    return torch.distributed.x\n"
    )
    assert imported(ast.parse(source)) >= {"a.b", "c", "c.d", "e", "f.g.h", "torch.distributed"}


@pytest.mark.parametrize("package", OWNERS)
def test_one_owner_per_dependency(package):
    users = {path for path in trees() if names_of(path, package)}
    if package == "omegaconf":  # the word MISSING may stand in the dataclass of any plugin
        users = {path for path in users if not names_of(path, package) <= {"omegaconf", "omegaconf.MISSING"}}
    assert {path for path in users if not path.startswith(OWNERS[package])} == set()


@pytest.mark.parametrize("package", ["megatron", "omegaconf", "torch.distributed"])
def test_the_owners_do_use_it(package):
    """A reader that saw nothing would pass every test above."""
    assert any(
        package in name for path, tree in trees().items() if path.startswith(OWNERS[package]) for name in imported(tree)
    )


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in kinds)


def broad_excepts(where: str, node: ast.AST, function: str = "") -> list[str]:
    """`path::function` of every handler that catches nearly everything."""
    found = [f"{where}::{function}"] if isinstance(node, ast.ExceptHandler) and is_broad(node) else []
    for child in ast.iter_child_nodes(node):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        found += broad_excepts(where, child, inner)
    return found


def test_broad_excepts_are_those_of_the_list():
    sources = dict(trees())
    sources |= {f"tools/{path.name}": ast.parse(path.read_text()) for path in (ROOT / "tools").rglob("*.py")}
    found = [place for path, tree in sources.items() for place in broad_excepts(path, tree)]
    assert sorted(found) == sorted(BROAD_EXCEPT)
    seen = "def f():\n    try: g()\n    except {}: pass\n"
    for kind in ("Exception", "BaseException as e", "(OSError, Exception)", ""):
        assert broad_excepts("x", ast.parse(seen.format(kind))) == ["x::f"]
    assert broad_excepts("x", ast.parse(seen.format("(OSError, ValueError)"))) == []


def test_the_environment_configures_nothing():
    found = {path for path, tree in trees().items() if imported(tree) & {"os.environ", "os.getenv", "os.putenv"}}
    assert {path for path in found if not path.startswith(tuple(ENVIRONMENT))} == set()


def test_rooms_without_devices_name_none():
    for path, tree in trees().items():
        if path.startswith(NO_DEVICE):
            words = {
                node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            assert not {word for word in words if word == "cuda" or word.startswith("cuda:")}, path


PICKLING = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\b")


def test_no_collective_pickles():
    assert PICKLING.search("dist.all_gather_object(found, mine)")
    for path in (ROOT / "moerl").rglob("*.py"):
        assert not PICKLING.search(path.read_text()), (
            f"{path}: what comes from a socket is not unpickled; use mcore/wire.py"
        )


UNPICKLERS = re.compile(
    r"_?pickle\.(loads?|Unpickler)|(torch|torch\.serialization)\.load|(pandas|.*\.ForkingPickler)\.(read_pickle|loads?)"
    r"|(marshal|shelve|dill|cloudpickle|joblib)(\..*)?"
)
"""Full names of what builds any object that bytes ask for."""
UNPICKLES = {
    "moerl/data/foreign/safe_load.py": {"torch.load"},  # with weights_only: it builds tensors and plain containers
    "tools/bench/publish.py": {"pickle.loads"},  # in the place of a server: of its own trainer, through its own pipe
}


def unpicklers(tree: ast.Module) -> set[str]:
    """What of a file's names could build any object, and arguments that allow it."""
    full: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            heads = {alias.name: alias.name.split(".")[0] for alias in node.names}  # `import a.b` gives the name a
            full |= {one.asname or heads[one.name]: one.name if one.asname else heads[one.name] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def name_of(node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{name_of(node.value)}.{node.attr}"
        return full.get(node.id, "") if isinstance(node, ast.Name) else ""

    names = {name_of(node) for node in ast.walk(tree)} | {*full.values()}
    allowed = {"allow_pickle": False, "weights_only": True}
    given = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in allowed]
    wrong = {str(one.arg) for one in given if getattr(one.value, "value", None) is not allowed[str(one.arg)]}
    return {name for name in names if UNPICKLERS.fullmatch(name)} | wrong


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle\npickle.loads(x)", "pickle.loads"),
        ("import pickle as p\nclass A(p.Unpickler): pass", "pickle.Unpickler"),
        ("from pickle import load as read\n", "pickle.load"),
        ("import torch.nn\nread = torch.load", "torch.load"),
        ("import numpy as np\nnp.load(x, allow_pickle=True)", "allow_pickle"),
        ("import numpy as np\nnp.load(x, allow_pickle=wanted)", "allow_pickle"),
        ("def f(load): load(weights_only=False)", "weights_only"),
        ("def f():\n    import marshal", "marshal"),
        ("import joblib.numpy_pickle as n", "joblib.numpy_pickle"),
        ("from dill import loads", "dill.loads"),
        ("from multiprocessing.reduction import ForkingPickler as F\nF.loads(x)", "multiprocessing.reduction.*"),
        ("import torch, pickle\nself.pickle.load, pickle.dumps(x), torch.save, load(x, allow_pickle=False)", ""),
    ],
)
def test_the_reader_sees_what_unpickles(source, name):
    found = unpicklers(ast.parse(source))
    assert re.fullmatch(name, found.pop() if found else "")
    assert not found


def test_nothing_is_unpickled():
    """Of a file, a server or a rank, bytes could run code."""
    paths = [path for folder in ("moerl", "kernels", "tools") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix(): unpicklers(ast.parse(path.read_text())) for path in paths}
    assert {path: names for path, names in found.items() if names} == UNPICKLES


def test_no_mocks_anywhere():
    for path in [*(ROOT / "moerl").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        assert not {name for name in imported(ast.parse(path.read_text())) if name.startswith("unittest")}, path


def test_nothing_ends_processes_by_name():
    words = ("pkill", "killall")
    for folder in ("moerl", "tools", "launch"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".sh", ".sbatch"}:
                assert not [word for word in words if word in path.read_text()], path


# What imports without what

BLOCK = """
import importlib, sys
blocked = set({blocked!r})
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(f"{{name}} is not for this room")
sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("blocked", "modules"),
    [
        (
            "torch numpy megatron transformers sglang wandb",
            "moerl moerl.errors moerl.config.load moerl.config.rules moerl.config.resume moerl.registry "
            "moerl.algorithms.presets moerl.algorithms.compose",
        ),
        (
            "megatron transformer_engine sglang wandb apex modelopt transformers",
            "moerl.types moerl.metrics moerl.protocols moerl.configure moerl.algorithms.objective moerl.models.family "
            "moerl.data.packing moerl.rewards moerl.reference.model moerl.telemetry.sinks",
        ),
    ],
    ids=["without-torch", "without-megatron"],
)
def test_imports_on_a_bare_machine(blocked, modules):
    code = BLOCK.format(blocked=blocked.split(), modules=modules.split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
