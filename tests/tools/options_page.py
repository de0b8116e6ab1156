"""Writes docs/options.md from the declarations: `python tests/tools/options_page.py`, or `make pages`."""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from p2pkv import config
from p2pkv.config import MIB, Options
from p2pkv.link_kinds import KINDS
from p2pkv_proxy.options import make_parser

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
SECTIONS = {
    "host": "Addresses",
    "secret_file": "Trust",
    "link": "The data",
    "lease_seconds": "Time and failure",
}
"""The first option of each section, in the order of the declarations."""

DEPENDS = {
    "host": "what vLLM would choose",
    "kv_port": f"{config.DEFAULT_KV_PORT}, vLLM's own",
    "discovery": "`curve` with a secret, else `plain`",
    "allowed_peers": "any",
    "staging_bytes": "1/128 of the GPU's memory, from 64 MiB to 1 GiB; 64 MiB without a GPU",
    "chunk_bytes": "1/16 of `staging_bytes`, from 8 to 64 MiB; 8 MiB without a GPU",
    "nccl_group_bytes": "twice the default of `chunk_bytes`",
    "prefetch_bytes": "0: off",
    "warm_up_api_key": "the variable `VLLM_API_KEY`",
}
"""Defaults that depend on the machine or on another option, or that need a remark."""

HEAD = """\
# Options

Every option of an instance and of the proxy. `make pages` writes this page from the code.

Write an instance's options under `kv_connector_extra_config` of `--kv-transfer-config`; only `kv_port` and
`kv_load_failure_policy` stand beside it. Numbers may be strings. `null` and `""` mean "not set". An unknown
option is refused at start. In brackets: the default, if there is one; and what must be the
same on P and D.
"""
VLLMS_OWN = (
    "- `kv_load_failure_policy` (`fail`; D's counts): vLLM's own: `fail` or `recompute` a prompt whose KV "
    "did not come"
)
FORMER = f"""
{", ".join(f"`{name}`" for name in config._FORMER)} of `P2pNcclConnector` have no effect, but for
a warning ([coming from there](coming-from-p2pnccl.md)).
"""
POLICIES = "operations.md#which-p-and-which-d"
PROXY = """
## Options of `p2pkv-proxy`

On the command line, in the environment (`--max-requests 64` as `P2PKV_PROXY_MAX_REQUESTS=64`), or in a TOML
file that `--config` names (`max-requests = 64`); the earlier of these wins.
"""


def declared() -> dict[str, list[str]]:
    """Unit, same and meaning of each field of Options, from the text below it."""
    (made,) = ast.parse(inspect.getsource(Options)).body
    return {
        ast.unparse(node.target): ast.literal_eval(after.value).replace("\n    ", " ").split(" | ")
        for node, after in zip(made.body, made.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def default(name: str, unit: str) -> str:
    if name in DEPENDS:
        return DEPENDS[name]
    value = next(field.default for field in msgspec.structs.fields(Options) if field.name == name)
    if value in (None, "", ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    if value and value % MIB == 0:
        return f"{value // MIB} MiB"
    return f"{value:g} {unit}" if unit in ("seconds", "milliseconds") else f"{value:g}"


def instance_rows() -> Iterator[str]:
    for name in config.OPTIONS:
        if name in SECTIONS:
            yield f"\n## {SECTIONS[name]}\n"
        unit, same, meaning = declared()[name]
        if name == "link":
            kinds = "; ".join(f"`{kind.name}` {kind.between}" for kind in KINDS.values())
            meaning = meaning.format(kinds=kinds)
        if unit.startswith("networks"):
            meaning = f"{unit}: {meaning}"
        same = "" if same == "no" else f"same: {same.removeprefix('yes: ')}"
        yield item(name, default(name, unit), same, meaning)
    yield VLLMS_OWN


def item(name: str, default: str, same: str, meaning: str) -> str:
    remarks = "; ".join(filter(None, [default if default not in ("none", "off") else "", same]))
    return f"- `{name}` ({remarks}): {meaning}" if remarks else f"- `{name}`: {meaning}"


def proxy_rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            continue
        meaning = re.sub(r",? ?\(?default: %\(default\)\w[^)]*\)?$", "", action.help or "")
        meaning = meaning.replace(", see above", f": a [policy]({POLICIES})")
        if action.choices and action.metavar is None:
            choices = " or ".join(f"`{each}`" for each in action.choices)
            meaning = f"{choices}: {meaning}".removesuffix(": ")
        given = action.default
        shown = f"`{given:g}`" if isinstance(given, float) else f"`{given}`"
        shown = "off" if given is False else "none" if given in (None, "", []) else shown
        yield item(action.option_strings[0], shown, "", meaning)


def page() -> str:
    rows = [HEAD.rstrip(), *instance_rows(), FORMER.rstrip(), PROXY, *proxy_rows(make_parser())]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
