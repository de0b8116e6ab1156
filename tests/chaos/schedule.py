"""Which fault happens when, to whom: a pure function of the seed."""

import random
from dataclasses import dataclass

LEASE = 2.0
"""`lease_seconds` of every engine in the run."""

PREFILLS = ("P0", "P1", "P2")
DECODES = ("D0", "D1", "D2")

SETTLE = 1.0
"""Seconds between the end of one fault and the next one of the same engine."""


@dataclass(frozen=True)
class Kind:
    """How often it is drawn, how long it lasts (seconds), and whether it needs a P's front door."""

    weight: int
    shortest: float
    longest: float
    door: bool = False


KINDS = {
    "kill": Kind(4, 0.1, 1.5),  # -9; started again at the end
    "restart": Kind(2, 0.1, 1.0),  # an orderly end; started again at the end
    "freeze, short": Kind(3, 0.2, 0.7 * LEASE),  # SIGSTOP, SIGCONT
    "freeze, long": Kind(3, 1.2 * LEASE, 2.0 * LEASE),
    "stalled link": Kind(3, 0.2, 1.5 * LEASE),
    "broken link": Kind(3, 0.0, 0.0),
    "flipped bit": Kind(3, 0.0, 0.0),  # in one message of every link that it has
    "hostile": Kind(3, 0.0, 0.0),  # bytes and messages at the control port
    "partition": Kind(3, 0.2, 1.5 * LEASE, door=True),  # both ways
    "partition to P": Kind(2, 0.2, 1.5 * LEASE, door=True),
    "partition from P": Kind(2, 0.2, 1.5 * LEASE, door=True),
    "reset": Kind(2, 0.0, 0.0, door=True),  # every control connection of a P
    "garbled": Kind(2, 0.0, 0.0, door=True),  # one bit of a control connection
}

SILENT_SECONDS = 5.0
"""Before the end nothing is garbled: it takes a request to find out that a connection is deaf."""


@dataclass(frozen=True)
class Fault:
    """Seconds count from the start of the run. `seed` decides what is left open (which bytes, where)."""

    at: float
    kind: str
    engine: str
    seconds: float
    seed: int

    def __str__(self) -> str:
        return f"{self.at:7.2f} s  {self.engine}  {self.kind}" + (
            f" for {self.seconds:.2f} s" if self.seconds else ""
        )


def schedule(seed: int | str, seconds: float) -> list[Fault]:
    """The faults of a run of so many seconds, in order. Two of one engine never overlap."""
    draw = random.Random(f"chaos {seed}")
    names, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    free = dict.fromkeys((*PREFILLS, *DECODES), 0.0)
    out: list[Fault] = []
    now = 1.0
    while now < seconds:
        name = draw.choices(names, weights)[0]
        kind = KINDS[name]
        idle = [each for each in (PREFILLS if kind.door else free) if free[each] <= now]
        lasts = round(draw.uniform(kind.shortest, kind.longest), 2)
        late = name == "garbled" and now > seconds - SILENT_SECONDS
        if idle and not late:
            engine = draw.choice(idle)
            out.append(Fault(round(now, 2), name, engine, lasts, draw.randrange(1 << 30)))
            free[engine] = now + lasts + SETTLE
        now += draw.uniform(0.2, 1.4)
    return out
