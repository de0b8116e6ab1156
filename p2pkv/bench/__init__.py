"""What `p2pkv bench` measures: the layer hook, a push, and the bare link, without vLLM."""
