"""Lets a server of the tests start in half the time: its engine and its ranks are forks.

On a GPU vLLM forks them by itself; on a CPU it spawns them, and each imports torch and vLLM anew. A plug-in
of vLLM, for the servers of tests: see `plugin_environment` in `support.servers`.
"""

import multiprocessing
from functools import cache
from typing import Any


@cache
def register() -> None:
    """Called by vLLM in its first process, before it starts others."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    context_of: Any = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return context_of("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_context
