"""One engine in a process that its parent did not fork: `python -m chaos.alone P0 ADDRESS DESCRIPTOR`.

Its links are TCP, whoever the peer is.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

from chaos.engine import main
from chaos.rough import tcp

from p2pkv.pairing import Address

if __name__ == "__main__":
    name, place, descriptor = sys.argv[1:]
    here = Address.parse(place)
    main(name, here, here, Connection(int(descriptor)), links=tcp)
