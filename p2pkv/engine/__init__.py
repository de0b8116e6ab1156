"""One rank's runtime: a thread that owns the sockets, the links and the copies of one rank.

docs/design.md, "The engine", has a map of its files.
"""
