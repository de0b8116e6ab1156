"""An engine whose links are TCP through a relay, and the machine that it is to the parent."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from chaos.engine import STAGING, Build, Side, main
from chaos.machines import CONTEXT, Machine
from chaos.rough import RoughLinks

from p2pkv.demo.processes import free_ports
from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address


class RoughSide(Side):
    """An engine that can be told how rough its data plane is."""

    def _obey(self, order: dict[str, Any]) -> None:
        if order["do"] == "manner":
            for links in self.links:
                rough = links.inner
                assert isinstance(rough, RoughLinks)
                vars(rough.manner).update(order["values"])
        else:
            super()._obey(order)


def live(name: str, outside: str, inside: str, wire: Connection, build: Build) -> None:
    """The life of such an engine."""

    def links() -> RoughLinks:
        return RoughLinks(HostLinks(Address.parse(inside).host, STAGING, shared_memory=False))

    main(name, outside, inside, wire, build, links, RoughSide)


class RoughMachine(Machine):
    """A D has a relay before each of its links, and a P, as any machine, one before its control port."""

    def __init__(self, name: str, build: Build) -> None:
        at = None if name.startswith("P") else Address("127.0.0.1", free_ports(build.tp))
        super().__init__(name, build, at)

    def treat_data(self, **values: Any) -> None:
        """Set the manner of the links to this D."""
        assert self.order("manner", values=values)

    def _spawn(self, wire: Connection) -> Any:
        process = CONTEXT.Process(
            target=live, args=(self.name, str(self.outside), str(self.inside), wire, self.build), daemon=True
        )
        process.start()
        return process
