"""One engine in a process that its parent did not fork: `python -m chaos.alone P0 ADDRESS DESCRIPTOR`.

Its links are TCP, whoever the peer is.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from chaos.engine import STAGING, main

from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address

if __name__ == "__main__":
    name, place, descriptor = sys.argv[1:]
    host = Address.parse(place).host
    links = lambda: HostLinks(host, STAGING, shared_memory=False)  # noqa: E731
    main(name, place, place, Connection(int(descriptor)), links=links)
