"""The p2pkv proxy: one OpenAI endpoint in front of vLLM instances that prefill and instances that decode.

docs/design.md, "The proxy", has the way of a request.
"""
