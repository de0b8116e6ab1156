"""Reads what tests/vllm/probe_connector.py writes down, and compares the pages of D with those of P."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from p2pkv.demo.processes import wait_until

SECONDS = 20.0


Place = tuple[int, int, int]
"""A KV group, a layer of it and a head, of the whole model."""


@dataclass(frozen=True)
class Note:
    """What one rank's pages held at the end of one transfer. `world`: ranks of this engine; `start`: the
    first token; `hashes`: by KV group, layer and global head: the first token of which the pages hold
    something (others have left the group's window), and one hash for each token from it on."""

    rank: int
    world: int
    start: int
    hashes: dict[Place, tuple[int, list[str]]]
    unlike: dict[int, int]
    """The KV groups whose rows differ from token to token, and the tokens of a row. Others have one row per
    request, or scales only."""

    @property
    def past(self) -> int:
        start, tokens = next(iter(self.hashes.values()))
        return start + len(tokens)


Notes = dict[str, dict[int, Note]]
"""By transfer key and rank; the last word counts."""


def notes(probes: Path, side: str, since: Mapping[Path, int] = MappingProxyType({})) -> Notes:
    """What the ranks of one side have written down, behind so many bytes of each file."""
    found: Notes = {}
    for file in sorted(probes.glob(f"{side}.*.jsonl")):
        with file.open("rb") as lines:
            lines.seek(since.get(file, 0))
            # The last line may be under way.
            for note in (json.loads(line) for line in lines if line.endswith(b"\n")):
                found.setdefault(note["key"], {})[note["rank"]] = _note(note)
    return found


def _note(note: dict[str, Any]) -> Note:
    hashes = {
        (number, layer, head): (group["start"], tokens)
        for number, group in enumerate(note["groups"])
        for layer, heads in enumerate(group["layers"], group["first_layer"])
        for head, tokens in zip(group["heads"], heads, strict=True)
    }
    unlike = {number: group["tokens"] for number, group in enumerate(note["groups"]) if group["unlike"]}
    return Note(note["rank"], note["world"], note["start"], hashes, unlike)


class Compared:
    """The transfers since this was made: the pages of D against those of P, by token, layer and head."""

    def __init__(self, probes: Path) -> None:
        self._probes = probes
        self._since = {file: file.read_bytes().rfind(b"\n") + 1 for file in probes.glob("*.jsonl")}

    def spans(self, at_least: int = 0) -> list[tuple[int, int]]:
        """Wait for so many loads, fail if one differs, and say which tokens [first, past) they were."""
        on_p: Notes = {}
        on_d: Notes = {}

        def all_written() -> bool:
            nonlocal on_p, on_d
            on_p, on_d = (notes(self._probes, side, self._since) for side in "PD")
            return len(on_d) >= at_least and all(_whole(on_d[k]) and _whole(on_p.get(k, {})) for k in on_d)

        wait_until(all_written, "what the probes write down", SECONDS)
        return sorted(_compare(on_p[key], ranks) for key, ranks in on_d.items())


def _whole(ranks: dict[int, Note]) -> bool:
    return bool(ranks) and len(ranks) == next(iter(ranks.values())).world


def _compare(on_p: dict[int, Note], on_d: dict[int, Note]) -> tuple[int, int]:
    """Every rank of D holds, for each of its layers and heads, what some rank of P holds."""
    loads = [(note.start, note.past) for note in on_d.values()]
    assert all(one == other for one, other in pairwise(loads)), f"the ranks of D loaded {loads}"
    first, past = loads[0]
    everything = {place for note in on_p.values() for place in note.hashes}
    for note in on_d.values():
        assert note.hashes.keys() <= everything, "D holds layers or heads that P has not"
        for place, (start, ours) in note.hashes.items():
            theirs = [_cut(*one.hashes[place], start, past) for one in on_p.values() if place in one.hashes]
            assert ours in theirs, (
                f"rank {note.rank}, (group, layer, head) {place}: {_differing(theirs[0], ours, start)}"
            )
    covered = {place for note in on_d.values() for place in note.hashes}
    assert covered == everything, "no rank of D holds some layers or heads of P"
    # Of tokens: the window of a convolution holds nothing yet after a short prompt.
    rows = [
        (place, tokens[:: note.unlike[place[0]]])
        for note in on_d.values()
        for place, (_, tokens) in note.hashes.items()
        if place[0] in note.unlike
    ]
    loaded = [one for _, tokens in rows for one in tokens]
    expected = len(loaded) * len({place for place, _ in rows}) / len(rows)
    assert len(set(loaded)) > expected * 0.9, "the pages hold the same bytes everywhere"
    return first, past


def _cut(start: int, tokens: list[str], first: int, past: int) -> list[str]:
    return tokens[first - start : past - start] if first >= start else []


def _differing(theirs: list[str], ours: list[str], first: int) -> str:
    pairs = enumerate(zip(theirs, ours, strict=True), first)
    return f"tokens {[token for token, (there, here) in pairs if there != here]} differ between P and D"
