"""The pages as a site: built without a warning, so without a dead link, and with short ways."""

import re
import sys
from pathlib import Path

import pytest

from support import commands

ROOT = Path(__file__).parents[2]
ANSWERS = {
    "P is on another host and D cannot reach it": (
        "docs/operations.html#two-hosts",
        "p2pkv doctor --connect",
    ),
    "which GPUs were tried": ("docs/compatibility.html#gpus", "One H200 has run the tests of kernels"),
}
"""What a new reader looks for, where it stands, and words of it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Each of the processes that test side by side makes a site of its own.
    made = tmp_path_factory.mktemp("site")
    pages, folder = made / "pages", made / "site"
    stamps = [argument for kind in ("cpu", "cuda") for argument in ("-o", f".venv/.installed-{kind}")]
    make = ("make", "site", *stamps, f"PY={sys.executable}", f"PAGES={pages}", f"SITE={folder}")
    done = commands.run(*make, cwd=ROOT, seconds=100.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def links(page: Path) -> set[Path]:
    targets = re.findall(r'href="([^"#:]+\.html)(?:#[^"]*)?"', page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def test_two_clicks_lead_to_every_page(site: Path) -> None:
    first = links(site / "index.html")
    second = {page for each in first for page in links(each)}
    pages = {path for path in site.rglob("*.html") if path.name not in ("404.html", "search.html")}
    assert pages <= first | second, "give the page a line of `nav` in mkdocs.yml, or a link"


@pytest.mark.parametrize("question", ANSWERS)
def test_one_click_leads_to_the_answer(site: Path, question: str) -> None:
    target, words = ANSWERS[question]
    assert f'<a href="{target}">{question}</a>' in (site / "index.html").read_text()
    file, _, anchor = target.partition("#")
    text = (site / file).read_text()
    assert words in re.sub("<[^>]+>", "", text[text.index(f'id="{anchor}"') :])
