"""P's side: for how long pages wait for a D, by a virtual clock."""

from __future__ import annotations

from protocol.sender_rigs import LEASE, Rig, claimed, held, offered

from p2pkv.protocol.machine import Finished, Released, SendTo
from p2pkv.protocol.messages import Failed
from p2pkv.protocol.sender import SendPhase


def test_no_lease_runs_while_p_computes_and_nobody_has_claimed() -> None:
    for rig in (held(), offered()):
        assert rig.sender.deadline is None and rig.sender.tick(1e9) == []
    rig = offered()
    rig.now = 5.0
    rig.compute()
    assert rig.sender.deadline == 5.0 + LEASE
    rig.now = 6.0
    rig.compute()
    assert rig.sender.deadline == 5.0 + LEASE
    assert rig.sender.tick(5.0 + LEASE - 0.01) == []
    reason = (
        f"D did not answer in time: no word from it about this request for {LEASE:g} s; P has let its KV go"
    )
    assert rig.sender.tick(5.0 + LEASE) == [Released(), Finished(False, reason)]


def test_a_claimed_leg_must_be_renewed_whatever_p_does() -> None:
    for make in (held, offered):
        rig = make()
        rig.now = 1.0
        rig.claim()
        rig.now = 20.0
        rig.claim()
        assert rig.sender.deadline == 20.0 + LEASE and rig.sender.tick(20.0 + LEASE - 0.01) == []
        effects = rig.sender.tick(20.0 + LEASE)
        assert isinstance(effects[0], SendTo) and isinstance(effects[0].message, Failed)
        assert effects[1] == Released() and isinstance(effects[2], Finished)


def test_the_lease_after_completion_runs_until_all_have_claimed_anew_from_each_claim() -> None:
    rig = Rig(expects=(0, 1))
    rig.offer()
    rig.compute()
    rig.now = 10.0
    rig.claim(0)
    for rig.now in (20.0, 30.0, 39.0):
        rig.claim(0)
    assert rig.sender.deadline == 10.0 + LEASE
    rig.claim(1)
    for rig.now in (50.0, 60.0):
        rig.claim(0)
        rig.claim(1)
    assert rig.sender.deadline == 60.0 + LEASE


def test_every_word_of_d_renews_and_an_ended_leg_has_no_lease() -> None:
    rig = claimed()
    rig.now = 1.0
    rig.want()
    assert rig.sender.deadline == 1.0 + LEASE
    rig.compute(9)
    said = rig.sender.flush()
    rig.now = 2.0
    rig.carry(said)
    assert rig.sender.deadline == 2.0 + LEASE and rig.states[1] == [SendPhase.DRAINED]
    rig.now = 3.0
    rig.done()
    assert rig.sender.deadline is None
    rig = claimed()
    rig.cancel()
    assert rig.sender.deadline is None
