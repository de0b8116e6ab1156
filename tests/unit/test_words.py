"""The words that users and newcomers meet: of class names, options, metrics and log lines each is one that an
engineer knows (words.txt), or one of ours that the glossary of docs/design.md explains."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import p2pkv
from p2pkv.config import Options
from p2pkv.engine.context import Counters
from p2pkv_proxy.exposition import Exposition
from p2pkv_proxy.metrics import Metrics
from p2pkv_proxy.options import make_parser

ROOT = Path(p2pkv.__file__).parents[1]
SOURCES = [path for folder in ("p2pkv", "proxy") for path in sorted((ROOT / folder).rglob("*.py"))]
MOST_OURS = 25
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
ENDINGS = "", "s", "es", "d", "ed", "ing", "ly", "er", "able"


def split(names: Iterable[str]) -> set[str]:
    """The words of names such as StepMetadata, lease_seconds or --retries."""
    return {word.lower() for name in names for word in WORD.findall(name)}


def glossary() -> list[str]:
    page = (ROOT / "docs" / "design.md").read_text()
    rows = page.partition("\n## Glossary\n")[2].partition("\n## ")[0].splitlines()
    return [
        row.split("|")[1].strip() for row in rows if row.startswith("| ") and not row.startswith("| term")
    ]


def listed(section: str) -> set[str]:
    text = (Path(__file__).parent / "words.txt").read_text()
    return set(text.partition(f"[{section}]\n")[2].partition("\n[")[0].split())


KNOWN = listed("names") | split(glossary())


def unknown(words: Iterable[str], known: set[str]) -> list[str]:
    """Those that are neither known nor a known word with an ending."""

    def is_known(word: str) -> bool:
        stems = {word.removesuffix(ending) for ending in ENDINGS}
        return bool(known & (stems | {f"{stem}e" for stem in stems}))

    return sorted(word for word in set(words) if not is_known(word))


def class_names(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def log_lines(source: str) -> Iterator[str]:
    """What calls of a logger say, without what they fill in."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) in ("log", "logger")
        ):
            for part in (each for argument in node.args for each in ast.walk(argument)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield re.sub(r"%[-.\d]*[sdrgf]|[\w/.-]*[_/.\\-]\w[\w/.-]*|'s\b", " ", part.value)


def metric_names() -> list[str]:
    metrics, counts = Metrics(), defaultdict[str, int](int)
    proxy: Any = SimpleNamespace(
        metrics=metrics, counted=lambda: counts, gauges=lambda: counts, instances=list, tenants=None
    )
    metrics.registry.register(Exposition(proxy))
    return [family.name for family in metrics.registry.collect()] + list(Counters.NAMES)


def test_class_names_have_words_that_an_engineer_knows() -> None:
    found = {
        name: unknown(split([name]), KNOWN) for path in SOURCES for name in class_names(path.read_text())
    }
    assert {name: words for name, words in found.items() if words} == {}


def test_options_have_such_words() -> None:
    proxys = [each for action in make_parser()._actions for each in action.option_strings]
    assert unknown(split([*Options.__struct_fields__, *proxys]), KNOWN) == []


def test_metrics_have_such_words() -> None:
    names = metric_names()
    assert len(names) > len(Counters.NAMES) + 20
    assert unknown(split(names), KNOWN) == []


def test_log_lines_have_such_words() -> None:
    words = split(line for path in SOURCES for line in log_lines(path.read_text()))
    assert unknown(words, KNOWN | listed("log lines")) == []


def test_the_glossary_is_short() -> None:
    assert 0 < len(split(glossary())) <= MOST_OURS


def test_a_riddle_is_found() -> None:
    names = class_names("class FarMeans: ...\nclass _Kept: ...")
    assert unknown(split(names), KNOWN) == ["far", "kept", "means"]
