"""The data plane: links of several kinds (`p2pkv.link_kinds`) behind the interface in `base`."""

from importlib import import_module
from typing import Any

import torch

from p2pkv.link_kinds import kind_of
from p2pkv.links.base import LinkFactory, LinkSettings


def make_factory(kind: str, **settings: Any) -> LinkFactory:
    """The factory of links for one rank. `kind`: as the option `link`; `settings`: those of LinkSettings.
    Raises ValueError for a kind that is unknown or that this machine lacks, a bad host, or no memory."""
    chosen = kind_of(kind, torch.cuda.is_available())
    module = import_module(f"p2pkv.links.{chosen.name}")
    factory: LinkFactory = module.make_links(LinkSettings(**settings))
    return factory
