"""What vLLM's sources say of its layers and its connector interface, read with `ast` and never imported.

So the same questions can be asked of a vLLM that is installed and of one that is only unpacked.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path

NEWEST = (0, 33)
"""The newest version whose layers and methods the tests list."""

_HEAD = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)
_PLANES = ("cache_role", "model_version", "tokens_per_state")
"""Arguments of a spec that decide whether p2pkv moves the layer."""


@dataclass(frozen=True)
class Class:
    """One class of one file; several files may have classes of one name."""

    name: str
    path: Path
    bases: tuple[str, ...]

    @cached_property
    def node(self) -> ast.ClassDef:
        for each in ast.parse(self.path.read_text()).body:
            if isinstance(each, ast.ClassDef) and each.name == self.name:
                return each
        raise AssertionError(f"{self.path} has no class {self.name}")

    @property
    def methods(self) -> dict[str, ast.FunctionDef]:
        return {f.name: f for f in self.node.body if isinstance(f, ast.FunctionDef)}

    @property
    def fields(self) -> set[str]:
        """The attributes that a dataclass declares."""
        return {
            each.target.id
            for each in self.node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }

    @property
    def assigned(self) -> set[str]:
        """Attributes that its methods give to `self`, and its properties."""
        stored = {
            each.attr
            for each in ast.walk(self.node)
            if isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        }
        return stored | {name for name, method in self.methods.items() if "property" in _decorators(method)}


@dataclass(frozen=True)
class LayerKind:
    """What the sources say of all layer classes of one name.

    Attributes:
        specs: the KVCacheSpec classes that it may keep, with those arguments that decide.
        hooked: vLLM calls save_kv_layer for it.
        state: of a recurrent layer vLLM's name for what it keeps; "" for others.
        sizes: the attributes that a recurrent layer has.
    """

    name: str
    specs: frozenset[str]
    hooked: bool
    state: str = ""
    sizes: frozenset[str] = field(default=frozenset(), compare=False)


class Sources:
    """vLLM's sources below `root`, the folder of the package `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
        self._classes = [
            Class(name, path, tuple(_last(base) for base in bases.split(",")))
            for path, text in self._texts.items()
            for name, bases in _HEAD.findall(text)
        ]

    @cached_property
    def version(self) -> tuple[int, int]:
        """As vLLM's build has written it down. A checkout, where no build has, counts as the newest known."""
        file = self.root / "_version.py"
        found = re.search(r"(?m)^__version__ = .*'(\d+)\.(\d+)", file.read_text()) if file.is_file() else None
        return (int(found[1]), int(found[2])) if found else NEWEST

    def since(self, major: int, minor: int) -> bool:
        return self.version >= (major, minor)

    def classes(self, name: str) -> list[Class]:
        return [each for each in self._classes if each.name == name]

    def one(self, name: str, file: str) -> Class:
        """The class of that name in this file, whether it has bases or not."""
        return Class(name, self.root / file, ())

    def below(self, top: str) -> list[Class]:
        """All classes that derive from `top`, at any distance."""
        known, found = {top}, list[Class]()
        while new := [each for each in self._classes if known & set(each.bases) and each not in found]:
            found += new
            known |= {each.name for each in new}
        return found

    # Layers.

    @property
    def spec_kinds(self) -> set[str]:
        """Every KVCacheSpec class."""
        return {each.name for each in self.below("KVCacheSpec")}

    @cached_property
    def hooked_functions(self) -> set[str]:
        """The functions after which vLLM calls save_kv_layer."""
        return {
            function.name
            for path, text in self._texts.items()
            if "@maybe_transfer_kv_layer" in text and path.name != "breakable_cudagraph.py"
            for function in ast.walk(ast.parse(text))
            if isinstance(function, ast.FunctionDef) and "maybe_transfer_kv_layer" in _decorators(function)
        }

    @cached_property
    def layer_kinds(self) -> dict[str, LayerKind]:
        """Every class that may register KV or a state, by its name."""
        layers = [each for each in self.below("AttentionLayerBase") if self._is_layer(each)]
        kinds: dict[str, LayerKind] = {}
        for each in layers:
            family = list(self._family(each))
            kind = LayerKind(
                each.name,
                frozenset(self._specs(family)),
                self._hooked(family),
                self._state(family),
                frozenset().union(*(one.assigned for one in family)),
            )
            other = kinds.get(each.name, kind)
            assert kind.state == other.state, f"{each.name} keeps different states in different files"
            kinds[each.name] = LayerKind(
                each.name,
                kind.specs | other.specs,
                kind.hooked or other.hooked,
                kind.state,
                kind.sizes & other.sizes,
            )
        return kinds

    def _is_layer(self, one: Class) -> bool:
        """Whether it is vLLM's layer, and not a class of another file that has its name."""
        return any(base.name == "AttentionLayerBase" for base in self._family(one))

    def _family(self, one: Class) -> Iterator[Class]:
        """The class, then its bases, the nearest first; of several with one name that of its own folder."""
        yield one
        for name in one.bases:
            here = [base for base in self.classes(name) if base.path != one.path or base.name != one.name]
            imported = [base for base in here if self._imports(one, base)]
            for base in (imported or here)[:1]:
                yield from self._family(base)

    def _imports(self, one: Class, base: Class) -> bool:
        """Whether the file of `one` has `base` itself or imports it."""
        if base.path == one.path:
            return True
        module = ".".join(base.path.relative_to(self.root.parent).with_suffix("").parts)
        return f"from {module} import" in self._texts[one.path]

    def _specs(self, family: list[Class]) -> Iterator[str]:
        """What its get_kv_cache_spec may return, and that of its bases where it asks them."""
        for one in family:
            method = one.methods.get("get_kv_cache_spec")
            if method is None:
                continue
            calls = [call for call in ast.walk(method) if isinstance(call, ast.Call)]
            for call in calls:
                name = _last(ast.unparse(call.func))
                decides = [word for word in call.keywords if word.arg in _PLANES]
                if name in self.spec_kinds or decides:
                    what = "".join(f", {word.arg}={ast.unparse(word.value)}" for word in decides)
                    yield f"{name}{what}"
            if not any(ast.unparse(call.func).startswith("super().") for call in calls):
                return

    def _hooked(self, family: list[Class]) -> bool:
        """Whether the forward that it has, its own or the nearest base's, goes through a hooked function."""
        for one in family:
            if one.methods.get("forward") is not None:
                text = ast.unparse(one.node)
                return any(name in text for name in self.hooked_functions)
        return False

    def _state(self, family: list[Class]) -> str:
        for one in family:
            if method := one.methods.get("mamba_type"):
                found = re.findall(r"MambaAttentionBackendEnum\.(\w+)", ast.unparse(method))
                return str(found[-1]) if found else ""
        return ""

    # Names.

    def names(self, module: str) -> set[str]:
        """What a module defines or imports at its top level; `module` is dotted and begins with vllm."""
        parts = module.split(".")[1:]
        file = self.root.joinpath(*parts)
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        return set(_defined(ast.parse(file.read_text()).body)) if file.is_file() else set()


def signature(function: ast.FunctionDef) -> str:
    """The names of its arguments, and which may be left out."""
    args = function.args
    words = [each.arg for each in (*args.posonlyargs, *args.args)]
    optional = len(args.defaults)
    shown = [name + ("=" if place >= len(words) - optional else "") for place, name in enumerate(words)]
    shown += [f"*{args.vararg.arg}"] if args.vararg else []
    shown += [f"{each.arg}=" for each in args.kwonlyargs]
    shown += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return ", ".join(shown)


def table(page: Path, beginning: str) -> dict[str, list[str]]:
    """The rows of a page's table whose heading begins so, by the names in each first cell."""
    lines = iter(page.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {beginning}"))
    found: dict[str, list[str]] = {}
    for line in takewhile(lambda line: line.startswith("|"), lines):
        first, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        for name in re.findall(r"`([^`]+)`", first):
            assert name not in found, f"the page has {name} twice"
            found[name] = cells
    return found


def _defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    for each in body:
        match each:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If(body=inner, orelse=other):
                yield from _defined([*inner, *other])
            case ast.Try(body=inner, handlers=handlers):
                yield from _defined([*inner, *(each for handler in handlers for each in handler.body)])


def _decorators(function: ast.FunctionDef) -> set[str]:
    return {_last(ast.unparse(each)) for each in function.decorator_list}


def _last(dotted: str) -> str:
    return dotted.strip().split("[")[0].split(".")[-1]
