"""The other end of a link, in a process of its own.

`python peer.py P|D shared-memory|tcp|ipc|nccl`; JSON lines both ways.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from p2pkv.links.base import LinkFactory
from support.links.pairs import links_of, send_sizes
from support.waiting import wait_for

STAGING = 1 << 25


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def hear() -> dict:
    return json.loads(sys.stdin.readline())


def be_d(links: LinkFactory) -> None:
    """Receive the sizes that P names; then post one receive more and poll until killed."""
    asked = hear()
    inbound, acceptance = links.accept(bytes.fromhex(asked["invitation"]), asked["window"])
    say(acceptance=acceptance.hex())
    receives = [inbound.post(nbytes) for nbytes in asked["sizes"]]
    say(remote_slots=[receive.remote_slot for receive in receives])
    wait_for(lambda: inbound.poll() or all(receive.done() for receive in receives))
    say(digests=[hashlib.sha256(receive.buffer.numpy().tobytes()).hexdigest() for receive in receives])
    for receive in receives:
        receive.release()
    last = inbound.post(asked["window"])
    say(remote_slot=last.remote_slot)
    while True:
        inbound.poll()
        time.sleep(0.001)


def be_p(links: LinkFactory) -> None:
    """Send noise of the sizes that D names; then fill and commit half of what D has posted last."""
    invitation = links.invite()
    say(invitation=invitation.hex())
    answer = hear()
    outbound = links.complete(invitation, bytes.fromhex(answer["acceptance"]))
    send_sizes(outbound, answer["sizes"], answer["remote_slots"])
    say(sent=True)
    asked = hear()
    send = outbound.reserve(asked["nbytes"], asked["remote_slot"])
    send.buffer[: asked["nbytes"] // 2] = 1
    say(half=True)
    while True:
        outbound.poll()
        time.sleep(0.001)


if __name__ == "__main__":
    {"P": be_p, "D": be_d}[sys.argv[1]](links_of(sys.argv[2], STAGING))
