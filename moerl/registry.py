"""The one extension mechanism: a name -> (config dataclass, target, what it needs).

A folder of plugins owns a `Registry`. The folder is scanned on first use, so no list is edited: adding a plugin is
adding a file. In YAML a plugin node is `{name: cispo, ...}`; a plugin outside the package is
`{name: "package.module:name", ...}`: the module is imported and registers itself.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from moerl.errors import ConfigError

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Plugin(Generic[T]):
    """One registered name."""

    name: str
    config_class: type
    """Frozen dataclass of its arguments."""
    target: T
    """The function or class itself."""
    needs: frozenset[str] = frozenset()
    """Optional fields of the inputs that it reads."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    """Facts that rules check, such as `form="score"` or `constant_advantage=True`."""


class Registry(Generic[T]):
    """Plugins of one kind, found by scanning one package on first use."""

    def __init__(self, kind: str, package: str) -> None:
        """`kind` is what error messages call it; `package` is the dotted folder that is scanned."""
        self.kind = kind
        self._package = package
        self._plugins: dict[str, Plugin[T]] = {}
        self._scanned = False

    def register(self, name: str, config_class: type, *, needs: Iterable[str] = (), **traits: Any) -> Callable[[T], T]:
        """Decorator that registers a function or class under `name`."""

        def add(target: T) -> T:
            if name in self._plugins and self._plugins[name].target.__qualname__ != target.__qualname__:
                raise ConfigError(f"two {self.kind} plugins are called {name!r}; rename one of them")
            self._plugins[name] = Plugin(name, config_class, target, frozenset(needs), traits)
            return target

        return add

    def names(self) -> list[str]:
        """Every known name, sorted."""
        self._scan()
        return sorted(self._plugins)

    def get(self, name: str) -> Plugin[T]:
        """The plugin called `name`; `module:name` imports the module first.

        Raises:
            ConfigError: no such plugin; says the nearest name.
        """
        self._scan()
        module, _, short = name.rpartition(":")
        if module:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(f"{self.kind} {name!r}: cannot import {module!r} ({error})") from error
        if short not in self._plugins:
            near = difflib.get_close_matches(short, self._plugins, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"no {self.kind} is called {name!r}{hint} Known: {', '.join(self.names())}")
        return self._plugins[short]

    def resolve(self, node: Mapping[str, Any], *, where: str = "") -> tuple[Plugin[T], Any]:
        """A YAML node `{name: ..., **arguments}` -> (plugin, its config object). Strict about names and types.

        Raises:
            ConfigError: unknown plugin, unknown argument or wrong type; names the field.
        """
        where = where or self.kind
        arguments = dict(node)
        name = arguments.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"{where}: needs a name; known: {', '.join(self.names())}")
        try:
            plugin = self.get(name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        return plugin, build_dataclass(plugin.config_class, arguments, where=f"{where} ({name})")

    def _scan(self) -> None:
        if self._scanned:
            return
        self._scanned = True
        package = importlib.import_module(self._package)
        folder = vars(package).get("__path__", ())  # a plain module registered all it has when it was imported
        for info in pkgutil.iter_modules(folder):
            importlib.import_module(f"{self._package}.{info.name}")


def build_dataclass(config_class: type, arguments: Mapping[str, Any], *, where: str) -> Any:
    """Build `config_class` from plain values with omegaconf's strict typing.

    Raises:
        ConfigError: an unknown key (with the nearest name) or a value of the wrong type.
    """
    from omegaconf.errors import OmegaConfBaseException

    known = [f.name for f in dataclasses.fields(config_class)]
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            allowed = ", ".join(known) or "no arguments"
            raise ConfigError(f"{where}: unknown key {key!r}{hint} (allowed: {allowed})")
    try:
        told = _in_json(arguments)
        return _typed(config_class, dict(arguments)) if told is None else copy.deepcopy(_remembered(config_class, told))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error


def _in_json(arguments: Mapping[str, Any]) -> str | None:
    """None where JSON does not hold them as they are."""
    try:
        told = json.dumps(arguments)
    except TypeError:
        return None
    return told if json.loads(told) == arguments else None


def _typed(config_class: type, arguments: dict[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(config_class), arguments))


@functools.lru_cache(maxsize=1024)
def _remembered(config_class: type, told: str) -> Any:
    """Of arguments in JSON: omegaconf takes a millisecond, and rules are resolved for every minibatch."""
    return _typed(config_class, json.loads(told))
