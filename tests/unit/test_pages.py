"""Pages: links, commands, options, tests and refusals that exist; and no binaries in the repository."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv
from p2pkv import config
from p2pkv.config import MIB, Options
from p2pkv_proxy.options import make_parser
from tools import pictures
from tools.options_page import DEPENDS, PAGE, SECTIONS, declared, page

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
PICTURES = {"docs/dashboard.png"}


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```", "", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_configurations_name_options_that_exist(name: str) -> None:
    """In each `kv_connector_extra_config`, and each command line of p2pkv-proxy, that a page shows."""
    text = (ROOT / name).read_text()
    for shown in re.findall(r'"kv_connector_extra_config":\s*\{([^{}]*)\}', text):
        assert set(re.findall(r'"(\w+)":', shown)) <= set(config.EXTRA)
    known = make_parser()._option_string_actions
    for command in re.findall(r"(?m)^p2pkv-proxy((?:.*\\\n)*.*)$", text):
        assert set(re.findall(r"(?<!\S)(--[\w-]+)", command)) <= known.keys()


def test_the_options_page_is_made_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run `make pages`"


def test_the_picture_of_a_pair_is_drawn_by_its_script() -> None:
    assert pictures.PAIR.read_text() == pictures.pair(), "run `make pictures`"


def test_operators_read_no_names_of_tests() -> None:
    assert re.findall(r"tests/\S+|\btest_\w+", (ROOT / "docs" / "operations.md").read_text()) == []


def test_no_binary_is_in_the_repository() -> None:
    """Wheels, weights and recordings stay out; a picture of a page is named above."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this tree is not a git repository")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and name not in PICTURES]
    assert len(files) > 100
    binary = [path for path in files if path.is_file() and b"\0" in path.read_bytes()[:65536]]
    large = [path for path in files if path.is_file() and path.stat().st_size > 1 << 20]
    assert binary + large == []


# docs/options.md is made from the declarations: what these must have, and what is written by hand there.


def test_every_field_says_what_it_is() -> None:
    said = declared()
    assert said.keys() == set(Options.__struct_fields__)
    for name in said.keys() - set(config.OPTIONS):
        assert said[name][0].startswith("Not an option: ")


@pytest.mark.parametrize("name", config.OPTIONS)
def test_each_option_has_a_unit_whether_it_must_be_the_same_and_a_meaning(name: str) -> None:
    about = declared()[name]
    assert len(about) == 3 and all(about)


def test_the_defaults_that_are_written_by_hand() -> None:
    assert {*DEPENDS, *SECTIONS} <= {*config.OPTIONS}
    assert DEPENDS["staging_bytes"] == (
        "1/128 of the GPU's memory, from 64 MiB to 1 GiB; 64 MiB without a GPU"
    )
    gib = 1024 * MIB
    assert [config.default_staging(size * gib) for size in (0, 4, 16, 80, 192)] == [
        *(64 * MIB, 64 * MIB, 128 * MIB, 640 * MIB, 1024 * MIB)
    ]
    made = Options.from_extra(
        {}, role="kv_consumer", kv_port=None, default_host="127.0.0.1", has_gpu=False, environ={}
    )
    assert (made.host, made.kv_port) == ("127.0.0.1", 14579)
    assert (made.discovery, made.allowed_peers, made.prefetch_bytes) == ("plain", None, 0)


# Each fault of faults.md has tests that are there; and the tests that pages name are there.


TABLE = (ROOT / "tests" / "faults.md").read_text().splitlines()
FAULTS = {
    fault: (seen, tests.split())
    for fault, seen, tests in (row.strip("| ").split(" | ") for row in TABLE if row.startswith("| "))
    if fault != "fault"
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_a_test(fault: str) -> None:
    seen, tests = FAULTS[fault]
    assert seen and tests
    assert [name for name in tests if not (ROOT / "tests" / name).is_file()] == []


MATRIX = (ROOT / "docs" / "compatibility.md").read_text()
INTERFACE = (ROOT / "tests" / "connector" / "vllm_interface.md").read_text()
CLAIMED = sorted(set(re.findall(r"`((?:tests/\S*|test_\w+\.py)(?:::\w+)?)`", MATRIX + INTERFACE)))


@pytest.mark.parametrize("name", CLAIMED)
def test_what_the_tables_name_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    files = [ROOT / path] if "/" in path else sorted((ROOT / "tests").rglob(path))
    assert files and all(file.exists() for file in files)
    assert not function or any(f"def {function}(" in file.read_text() for file in files)


def test_no_request_is_ticked_without_a_test() -> None:
    rows = MATRIX.split("## Requests")[1].split("## ")[0].splitlines()
    ticked = [row for row in rows if row.startswith("| ") and "✓" in row]
    assert len(ticked) > 10
    assert [row for row in ticked if "`test_" not in row and "`tests/" not in row] == []


# The table of refused shapes against the code.


PRODUCT = Path(p2pkv.__file__).parent
FILES = [
    *(
        f"connector/{name}.py"
        for name in (
            "attention_rows",
            "circular_buffers",
            "connector",
            "describe",
            "recurrent",
            "stage_layers",
        )
    ),
    "protocol/handshake.py",
    "plan.py",
]
ERRORS = {"ConfigError", "Refused", "ShardingError"}
OTHER = {"negotiate", "make_plan", "_check_same"}
"""Two instances that are not of one model, are configured differently, or describe themselves wrongly."""


def refusals(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """The function of each `raise` of such an error, with its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from refusals(node, (*within, node.name))
            continue
        error = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(error, ast.Call) and isinstance(error.func, ast.Name) and error.func.id in ERRORS:
            yield ".".join(within)
        yield from refusals(node, within)


def test_each_refusal_of_a_shape_is_a_line_with_its_reason() -> None:
    found = Counter(
        f"{file}:{function}"
        for file in FILES
        for function in refusals(ast.parse((PRODUCT / file).read_text()))
        if function not in OTHER
    )
    lines = (ROOT / "tests" / "connector" / "refused_shapes.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][
        1:
    ]
    assert all(len(row) == 3 and all(row) for row in rows), "what, where, why"
    listed: Counter[str] = Counter()
    for _, where, _ in rows:
        for name, number in re.findall(r"`([^`]+)`(?: \((\d+)\))?", where):
            listed[name] += int(number or 1)
    assert listed == found
