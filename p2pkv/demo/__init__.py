"""A pair of vLLM servers on this machine: what `p2pkv demo`, tests and benchmarks start and ask."""
