"""What a bad member and a stranger say to a control port during the run."""

import contextlib
import random
import threading

import zmq
from chaos.engine import SECRET

from p2pkv.control.security import members_of
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from support.hostile import RAW, dealer, nonsense, shout

MESSAGES = 100
ANSWER_SECONDS = 3.0


def harass(address: Address, seed: int) -> threading.Thread:
    """Say wrong things there, from a thread that ends by itself."""
    thread = threading.Thread(target=_harass, args=(address, seed), daemon=True)
    thread.start()
    return thread


def _harass(address: Address, seed: int) -> None:
    draw = random.Random(seed)
    with contextlib.suppress(OSError, zmq.ZMQError):
        for data in draw.sample(list(RAW.values()), 3):
            shout(address, data).close()
        with dealer(address, members_of(SECRET)) as line:
            for data in draw.sample(list(nonsense()), MESSAGES):
                line.send(data)
            line.send(m.encode(m.Inspect()))
            line.poll(int(ANSWER_SECONDS * 1000))
