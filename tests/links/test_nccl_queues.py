"""What NCCL links take of hardware that they share with the model: queues and multiprocessors. Ranks
that all do so at once are in tests/engine/test_nccl_queues.py.

Not verified on a GPU: `nccl_simulated_gpu` has the rules of real ones, and where each comes from.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch

from p2pkv.links.base import Inbound, Outbound, Receive, Send
from p2pkv.links.nccl import NcclLinks
from p2pkv.links.nccl_communicator import BusyEnds
from support.links.pairs import connect, nccl_links, noise, simulated
from support.nccl.gpu import Model, SimulatedGpu
from support.waiting import wait_for

ANNOUNCED = 2
"""Sends of a link that are announced, of which one is on the device."""

WINDOW = 1 << 20
NBYTES = 1000
AHEAD = 4
SECONDS = 20.0


@dataclass
class Line:
    """One link, and what the engines say about it: grants, and with `announced` that a send is launched."""

    outbound: Outbound
    inbound: Inbound
    announced: bool
    granted: deque[int] = field(default_factory=deque)
    committed: int = 0
    launched: int = 0
    sends: list[Send] = field(default_factory=list)
    said: int = 0
    heard: int = 0
    groups: deque[int] = field(default_factory=deque)
    """How many sends go together of those that P has announced; else one."""
    receives: deque[tuple[int, Receive]] = field(default_factory=deque)
    arrived: int = 0
    wrong: int = 0

    def grant(self, count: int = 1) -> None:
        """D: post receives, and tell P of them."""
        for _ in range(count):
            receive = self.inbound.post(NBYTES)
            self.receives.append((self.arrived + len(self.receives), receive))
            self.granted.append(receive.remote_slot)

    def decide(self) -> bool:
        """P: fill the send for the oldest grant; False if there is none, or no room."""
        if not self.granted:
            return False
        send = self.outbound.reserve(NBYTES, self.granted[0])
        if send is None:
            return False
        self.granted.popleft()
        send.buffer.copy_(noise(NBYTES, self.committed))
        self.committed += 1
        self.sends.append(send)
        send.commit()
        return True

    def turn_of_p(self) -> None:
        self.outbound.poll()
        while self.announced and self.launched < self.committed and (count := self.announce()):
            self.launch(count)

    def announce(self) -> int:
        """P: tell D of the sends that may be launched, so many."""
        if count := self.outbound.due(most=AHEAD):
            self.groups.append(count)
            self.said += count
        return count

    def launch(self, count: int) -> None:
        """P: launch those."""
        self.launched += count
        self.outbound.launch(count)

    def turn_of_d(self) -> None:
        while self.heard < self.said:
            count = self.groups.popleft() if self.groups else 1
            self.heard += count
            self.inbound.launch(count)
        self.inbound.poll()
        while self.receives and self.receives[0][1].done():
            number, receive = self.receives.popleft()
            self.arrived += 1
            self.wrong += not torch.equal(receive.buffer, noise(NBYTES, number))
            receive.release()


class Mesh:
    """Two ranks of P and two of D, each with a device, and a link from each to each."""

    def __init__(
        self,
        *,
        queues: int = 1,
        announced: bool = True,
        processors: int = 132,
        sides: tuple[int, int] = (2, 2),
        **options: int,
    ) -> None:
        options = {"group_bytes": 0, "processors": processors, **options}
        self.gpus = [[SimulatedGpu(queues, processors) for _ in range(side)] for side in sides]
        self.ranks: list[list[NcclLinks]] = [
            [nccl_links(gpu=gpu, announced=announced, **options) for gpu in gpus] for gpus in self.gpus
        ]
        self.lines: dict[tuple[int, int], Line] = {}
        for (i, p), (j, d) in itertools.product(*map(enumerate, self.ranks)):
            pair = connect((p, d), WINDOW)
            self.lines[i, j] = Line(pair.outbound, pair.inbound, announced)
        wait_for(lambda: not self.occupied("P") and not self.occupied("D"))

    def occupied(self, side: str) -> int:
        return sum(gpu.occupied for gpu in self.gpus["PD".index(side)])

    def model(self, side: str) -> Model:
        return Model(self.gpus["PD".index(side)])

    def grant(self, count: int = AHEAD) -> None:
        for line in self.lines.values():
            line.grant(count)
        self.turns_of_d()

    def turns_of_d(self, count: int = 10) -> None:
        for _ in range(count):
            for line in self.lines.values():
                line.turn_of_d()

    def deliver(self, count: int) -> None:
        """P decides, and so many messages of each link arrive."""

        def turn() -> bool:
            for line in self.lines.values():
                line.decide()
                line.turn_of_p()
                line.turn_of_d()
            return all(line.arrived == count for line in self.lines.values())

        wait_for(turn)
        assert not any(line.wrong for line in self.lines.values())

    def abort(self) -> None:
        for line in self.lines.values():
            line.inbound.abort()
            line.outbound.abort()


# D waits for what P decides.


@pytest.mark.parametrize("queues", [1, 8])
@pytest.mark.parametrize("announced", [True, False])
def test_d_computes_while_p_decides(queues: int, announced: bool) -> None:
    """D has granted, and P, which is held up, has sent nothing: D's steps go on, over both of its ranks."""
    mesh = Mesh(queues=queues, announced=announced)
    model = mesh.model("D")
    mesh.grant()
    for _ in range(3):
        assert model.runs(SECONDS)
        mesh.turns_of_d()
    mesh.deliver(AHEAD)
    assert model.runs(SECONDS)


def test_links_that_are_not_announced_hold_one_operation_each() -> None:
    mesh = Mesh(announced=False)
    mesh.grant()
    assert mesh.occupied("D") == len(mesh.lines) * 8
    mesh.deliver(AHEAD)


def test_d_computes_on_when_p_is_killed_after_it_announced() -> None:
    mesh = Mesh()
    model = mesh.model("D")
    mesh.grant()
    for line in mesh.lines.values():
        line.said += 2  # and P is gone before it launches what it announced
    mesh.turns_of_d()
    assert mesh.occupied("D") == len(mesh.lines) * 8
    for _ in range(3):
        assert model.runs(SECONDS)
        mesh.turns_of_d()
    mesh.abort()
    wait_for(lambda: mesh.occupied("D") == 0 and all(d.staging.used == 0 for d in mesh.ranks[1]))


def test_p_computes_on_when_d_is_killed_before_it_launches() -> None:
    mesh = Mesh()
    model = mesh.model("P")
    mesh.grant()
    for line in mesh.lines.values():
        while line.decide():
            line.turn_of_p()
    assert mesh.occupied("P") > 0
    for _ in range(3):
        assert model.runs(SECONDS)
        for line in mesh.lines.values():
            line.turn_of_p()
    assert max(line.said for line in mesh.lines.values()) <= ANNOUNCED
    mesh.abort()
    wait_for(lambda: mesh.occupied("P") == 0)


@pytest.mark.parametrize("group_bytes", [0, WINDOW])
def test_steps_of_tensor_parallel_ranks_close_no_cycle(group_bytes: int) -> None:
    """P sends two messages to each rank of D, whose steps meet in an all-reduce.

    A cycle, if two receives or sends of a link are launched at once: D 0's step waits behind its second
    receive, that for P's first send to it, that stands behind P's second send to D 1, that waits for the
    first, that for D 1's receive, that stands behind D 1's step, and that waits in the all-reduce for D 0.
    """
    mesh = Mesh(sides=(1, 2), group_bytes=group_bytes)
    first, second = mesh.lines[0, 0], mesh.lines[0, 1]
    for line in (first, second):
        line.grant(2)
    for _ in range(10):
        first.turn_of_d()
    for line in (second, first):
        for _ in range(10):
            line.decide()
            line.turn_of_p()
    ends = mesh.model("D").step()

    def turn() -> bool:
        for line in (first, second):
            line.turn_of_p()
            line.turn_of_d()
        return first.arrived == second.arrived == 2

    wait_for(turn)
    assert all(gpu.wait(end, SECONDS) for gpu, end in zip(mesh.gpus[1], ends, strict=True))
    assert not first.wrong and not second.wrong


# Whose turn it is.


def test_ends_get_multiprocessors_in_the_order_in_which_they_asked() -> None:
    busy = BusyEnds(2)
    assert busy.turn_of("a") and busy.enter("a")
    assert busy.turn_of("b") and busy.enter("b")
    assert not busy.turn_of("c") and not busy.turn_of("d") and busy.contended
    assert busy.turn_of("a"), "who has some keeps them"
    busy.rest("b")
    assert not busy.turn_of("d") and not busy.turn_of("b")
    assert busy.turn_of("c") and busy.enter("c")
    busy.leave("d")
    busy.rest("a")
    assert busy.turn_of("b") and busy.enter("b") and not busy.contended


def test_a_link_announces_ahead_only_while_none_waits() -> None:
    mesh = Mesh(sides=(1, 2), processors=32)
    first, second = mesh.lines.values()
    mesh.grant()
    for line in (first, second):
        while line.decide():
            pass
    first.turn_of_p()
    assert first.said == ANNOUNCED
    second.turn_of_p()
    assert second.said == 0
    wait_for(lambda: first.turn_of_p() or first.turn_of_d() or first.arrived == ANNOUNCED)
    assert first.said == ANNOUNCED, "the other's turn"
    wait_for(lambda: [line.turn_of_p() or line.turn_of_d() for line in (first, second)] and
               first.arrived == second.arrived == AHEAD)  # fmt: skip


def test_a_p_that_pushes_without_end_leaves_d_time_for_another() -> None:
    """D may have one link on its device, and of the first one the next send is always announced."""
    mesh = Mesh(sides=(2, 1), processors=32)
    first, second = mesh.lines.values()

    def turn(line: Line) -> None:
        line.turn_of_p()
        line.turn_of_d()

    def push() -> None:
        while len(first.granted) + len(first.receives) < AHEAD:
            first.grant()
        while first.decide():
            pass
        turn(first)

    wait_for(lambda: push() or first.arrived)
    second.grant()
    second.decide()
    before = first.arrived
    wait_for(lambda: push() or turn(second) or second.arrived or first.arrived - before > 100)
    assert second.arrived


def test_ranks_that_announce_to_several_before_they_launch_never_wait_in_a_circle() -> None:
    """Each rank may have one link on its device. In one turn of P its links announce one after the other, and
    are launched when all `Sent` messages are out. Both of P's ranks begin with another link, and each of D's
    with the one of which P launches the other's first."""
    mesh = Mesh(processors=32)
    mesh.grant(1)
    for line in mesh.lines.values():
        line.decide()
    for order in (((0, 0), (0, 1)), ((1, 1), (1, 0))):
        said = {place: mesh.lines[place].announce() for place in order}
        assert list(said.values()) == [1, 0], "the other one could not be launched now"
        for place, count in said.items():
            if count:
                mesh.lines[place].launch(count)
    for place in ((1, 0), (0, 0), (0, 1), (1, 1)):
        mesh.lines[place].turn_of_d()
    mesh.deliver(1)


def test_an_end_that_has_announced_keeps_its_turn() -> None:
    """What it announced ahead is launched before another link, although the first is done by then."""
    mesh = Mesh(sides=(1, 2), processors=32)
    first, second = mesh.lines.values()
    mesh.grant(2)
    for line in (first, second):
        while line.decide():
            pass
    first.launch(first.announce())
    ahead = first.announce()
    assert ahead == 1 and not second.announce()
    wait_for(lambda: first.outbound.poll() or first.turn_of_d() or first.arrived == 1)
    first.outbound.poll()
    assert not second.announce()
    first.launch(ahead)
    wait_for(lambda: first.outbound.poll() or first.turn_of_d() or first.arrived == 2)
    wait_for(lambda: first.turn_of_p() or second.turn_of_p() or second.turn_of_d() or second.arrived == 2)


def test_sends_that_are_ready_together_are_one_launch() -> None:
    """Up to so many bytes, and on both sides alike, as the simulation of NCCL demands."""
    mesh = Mesh(sides=(1, 1), group_bytes=3 * NBYTES)
    (line,) = mesh.lines.values()
    mesh.grant(5)
    while line.decide():
        pass
    wait_for(lambda: line.turn_of_p() or line.turn_of_d() or line.arrived == 5)
    assert not line.wrong
    for (rank,) in mesh.ranks:
        assert simulated(rank).groups == [1, 3, 2], "the first one is that of the handshake"


def test_a_link_launches_ahead_only_while_it_is_busy_alone() -> None:
    mesh = Mesh(queues=8, sides=(1, 2), in_flight=2)
    first, second = mesh.lines.values()
    (gpu,) = mesh.gpus[0]
    mesh.grant()
    for line in (first, second):
        while line.decide():
            pass
    wait_for(lambda: first.turn_of_p() or gpu.launched == 2)
    for line in (second, first) * 10:
        line.turn_of_p()
    assert gpu.launched == 2 and not second.said, "it might wait behind the first one's second"
    assert first.said == ANNOUNCED + 1
    mesh.deliver(AHEAD)
    wait_for(lambda: first.turn_of_p() or second.turn_of_p() or gpu.launched == 0)
    for _ in range(2):
        for line in (first, second):
            line.grant()
            line.decide()
        for line in (first, second) * 10:
            line.turn_of_p()
        assert gpu.launched == 2, "one of each"
    mesh.deliver(AHEAD + 2)


def test_ranks_that_launch_ahead_never_wait_in_a_circle() -> None:
    """On P all streams share one queue, and of two sends of a link that are launched the second holds it up.
    D has multiprocessors for one link. Both of P's ranks begin with another link, and each of D's with the
    one that P's ranks launch last."""
    mesh = Mesh(queues=1, in_flight=2)
    for rank in mesh.ranks[1]:
        rank.shared.busy.most = 1
    mesh.grant(2)
    for line in mesh.lines.values():
        while line.decide():
            pass
    for order in (((0, 0), (0, 1)), ((1, 1), (1, 0))):
        for place in order:
            for _ in range(10):
                mesh.lines[place].turn_of_p()
    for place in ((1, 0), (0, 0), (0, 1), (1, 1)):
        mesh.lines[place].turn_of_d()
    mesh.deliver(2)


def test_ranks_of_both_roles_launch_nothing_ahead() -> None:
    """Else each one's receive could wait behind its second send, and that for the other one's receive."""
    ranks = [nccl_links(gpu=SimulatedGpu(1), announced=True, in_flight=2, group_bytes=0) for _ in range(2)]
    for rank in ranks:
        rank.carry_both_ways()
    pairs = [connect((p, d), WINDOW) for p, d in (ranks, reversed(ranks))]
    lines = [Line(pair.outbound, pair.inbound, announced=True) for pair in pairs]
    for line in lines:
        line.grant(2)
        while line.decide():
            pass
        for _ in range(10):
            line.turn_of_p()

    def turn() -> bool:
        for line in lines:
            line.turn_of_d()
            line.turn_of_p()
        return all(line.arrived == 2 for line in lines)

    wait_for(turn)
