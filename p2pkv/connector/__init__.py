"""The plug-in's vLLM side: the only part of p2pkv that imports vLLM.

CONTRIBUTING.md, "Where what is", has a map of its files.
"""

from p2pkv.connector.connector import P2pKvConnector, P2pNcclConnector

__all__ = ["P2pKvConnector", "P2pNcclConnector"]
