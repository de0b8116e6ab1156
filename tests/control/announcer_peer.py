"""A worker that announces itself, which its tests hold up, freeze and kill.

`python announcer_peer.py ANNOUNCEMENT`, as JSON; JSON lines both ways.
"""

import json
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from p2pkv.control.announcer import Announcement, Announcer, EngineHealth
from support.gil import hold_lock


def main(announcement: str) -> None:
    health = EngineHealth()
    task = msgspec.json.decode(announcement, type=Announcement)
    announcer = Announcer(task, lambda addresses: None, lambda: health)
    print(json.dumps({"pid": announcer._child.pid}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "hold":
            print(json.dumps({"holding": True}), flush=True)
            hold_lock(order["seconds"])
        elif order["do"] == "stand":
            health = msgspec.convert(order["standing"], EngineHealth)
        elif order["do"] == "stop":
            announcer.stop()
        print(json.dumps({"done": True}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
