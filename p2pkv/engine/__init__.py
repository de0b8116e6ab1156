"""One rank's runtime: a thread that owns the sockets, the links and the copies of one rank.

CONTRIBUTING.md, "Where what is", has a map of its files.
"""
