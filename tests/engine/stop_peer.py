"""A rank in a process of its own, which its tests stop, kill, and start again.

`python stop_peer.py P|D KV_PORT PROXY_PORT shared-memory|tcp [LEASE [SECRET]]`; JSON lines both ways. It ends
as vLLM's worker does: SIGTERM raises SystemExit in the main thread; then the pinger is stopped, and the rank.
"""

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

from p2pkv.control.discovery import Ping
from p2pkv.control.pinger import Pinger
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from support.engine.engines import Engine, Geometry, make_engine, plain_links, prefill, step
from support.engine.transfers import BLOCKS, expect, load
from support.gil import hold_lock

LEASE = 2.0


def obey(engine: Engine, order: dict[str, Any]) -> None:
    if order["do"] == "hold":
        print(json.dumps({"holding": True}), flush=True)
        hold_lock(order["seconds"])
        return
    peer, key, tokens = Address.parse(order["peer"]), order["key"], order["tokens"]
    match order["do"]:
        case "prefill":
            prefill(engine, key, peer, tokens, BLOCKS, chunk=tokens)
        case "half":
            engine.do(do.OfferPrompt(key, peer, tokens, b"digest"))
            step(engine, key, BLOCKS, 0, tokens // 2)
        case "load":
            expect(peer, engine, key, tokens=tokens)
            load(engine, key, tokens, BLOCKS)


def end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(0)


def main(
    role: str, kv_port: str, proxy_port: str, mode: str, lease: str = str(LEASE), secret: str = ""
) -> None:
    signal.signal(signal.SIGTERM, end)
    options = {"kv_port": int(kv_port), "lease_seconds": float(lease), "secret": secret.encode() or None}
    engine = make_engine(role, Geometry(), partial(plain_links(mode), role), **options)
    http = "127.0.0.1:8000"
    assert role in ("P", "D")
    ping = Ping(type="P" if role == "P" else "D", http_address=http, zmq_address=str(engine.address))
    pinger = Pinger(f"127.0.0.1:{proxy_port}", ping, interval=0.1)
    pinger.start()
    try:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            obey(engine, json.loads(line))
            print(json.dumps({"done": True}), flush=True)
    finally:
        pinger.stop()
        engine.stop()
        print(json.dumps({"alive": [each.rank.alive for each in engine.ranks]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
