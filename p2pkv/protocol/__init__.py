"""The conversation of two ranks, without IO: nothing here opens a socket, reads a clock or blocks."""
