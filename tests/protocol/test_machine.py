"""Every table, row by row: legal moves lead where it says, all others raise whose fault it was."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest

from p2pkv.protocol import receiver, sender
from p2pkv.protocol.state_machine import LocalProtocolError, Machine, ProtocolError, RemoteProtocolError

TABLES: list[tuple[dict[Any, dict[Any, Any]], type[Enum], type[Enum]]] = [
    (dict(sender.PROMPT), sender.PromptPhase, sender.PromptEvent),
    (dict(sender.SEND), sender.SendPhase, sender.SendEvent),
    (dict(receiver.LOAD), receiver.LoadPhase, receiver.LoadEvent),
]
MOVES = [
    (table, state, event) for table, states, events in TABLES for state, event in product(states, events)
]


@pytest.mark.parametrize(("table", "state", "event"), MOVES, ids=lambda value: getattr(value, "name", ""))
def test_a_move_is_in_the_table_or_an_error(
    table: dict[Any, dict[Any, Any]], state: Enum, event: Enum
) -> None:
    to = table[state].get(event)
    for error in (LocalProtocolError, RemoteProtocolError):
        machine = Machine("thing", table, state)
        move = machine.local if error is LocalProtocolError else machine.remote
        if to is not None:
            move(event)
            assert machine.state is to
            continue
        with pytest.raises(ProtocolError, match=f"^thing: {event.name} in state {state.name}$") as raised:
            move(event)
        assert raised.type is error
        assert machine.state is state


@pytest.mark.parametrize(("table", "states", "events"), TABLES)
def test_the_tables_are_complete_and_every_state_is_reached(
    table: dict[Any, dict[Any, Any]], states: type[Enum], events: type[Enum]
) -> None:
    assert set(table) == set(states)
    assert {event for row in table.values() for event in row} == set(events)
    reached, fresh = set(), {next(iter(states))}
    while fresh:
        reached |= fresh
        fresh = {to for state in fresh for to in table[state].values()} - reached
    assert reached == set(states)


def test_ended_is_a_state_that_nothing_leads_out_of() -> None:
    load = Machine("load", receiver.LOAD, receiver.LoadPhase.WAITING)
    assert not load.ended and load.state is receiver.LoadPhase.WAITING
    load.local(receiver.LoadEvent.END)
    assert load.ended and load.state is receiver.LoadPhase.ENDED
