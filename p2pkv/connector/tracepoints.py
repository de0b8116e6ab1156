"""Where `p2pkv waterfall` looks at a request in vLLM's processes: see `p2pkv.stamps`."""

from collections.abc import Iterable
from typing import Any

from p2pkv.stamps import Stamps


def install(stamps: Stamps) -> None:
    """In any process of vLLM's."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner

    def headed(protocol: Any) -> Iterable[str]:
        return [value.decode("latin-1") for name, value in protocol.headers if name == b"x-request-id"]

    def named(_: Any, __: Any, raw_request: Any = None) -> Iterable[str]:
        return [] if raw_request is None else [raw_request.headers.get("x-request-id", "")]

    def one(_: Any, request: Any, *__: Any, **___: Any) -> Iterable[str]:
        return [request.request_id]

    stamps.wrap(HttpToolsProtocol, "on_headers_complete", "server: asked", headed)
    stamps.wrap(OpenAIServingCompletion, "create_completion", "server: parsed", named)
    stamps.wrap(OpenAIServingChat, "create_chat_completion", "server: parsed", named)
    stamps.wrap(AsyncLLM, "_add_request", "server: tokenized", one)
    stamps.wrap(
        OutputProcessor,
        "process_outputs",
        "server: first token",
        lambda _, outputs, *__, **___: [each.request_id for each in outputs if each.new_token_ids],
    )

    from p2pkv.connector.connector import P2pKvConnector
    from p2pkv.connector.worker import Loads, Worker
    from p2pkv.engine import commands as do
    from p2pkv.engine.decode import Decode

    def scheduled(_: Any, output: SchedulerOutput, *__: Any, **___: Any) -> Iterable[str]:
        return [*output.num_scheduled_tokens]

    def computed(worker: Any, *_: Any) -> Iterable[str]:
        return [key for key, _ in worker._computed.prompts]

    def received(_: Any, output: Any) -> Iterable[str]:
        return output.finished_recving or ()

    stamps.wrap(Scheduler, "add_request", "core: request", one)
    stamps.wrap(Scheduler, "_update_after_schedule", "core: step", scheduled)
    for runner in (V1Runner, V2Runner):
        stamps.wrap(runner, "execute_model", "worker: step begins", scheduled)
        stamps.wrap(runner, "execute_model", "worker: step has ended", scheduled, after=True)
    stamps.wrap(P2pKvConnector, "update_state_after_alloc", "core: blocks", one)
    stamps.wrap(P2pKvConnector, "update_connector_output", "core: load seen", received)
    stamps.wrap(Scheduler, "update_from_output", "core: step's result", scheduled)
    stamps.wrap(Worker, "layer", "worker: first layer", computed)
    stamps.wrap(Worker, "end", "worker: forward has ended", computed, again=True)
    stamps.wrap(Decode, "prefetch", "engine: KV is announced", lambda _, __, message, ___: [message.key])
    stamps.wrap(Decode, "_store", "engine: KV is ahead", lambda _, entry, *__: [entry.expect.key], again=True)
    stamps.wrap(Decode, "load", "engine: load", lambda _, command, __: [command.key])
    stamps.wrap(
        Decode, "_written", "engine: KV is in blocks", lambda _, entry, *__: [entry.expect.key], again=True
    )
    stamps.wrap(Decode, "expect", "engine: request", lambda _, command, __: [command.key])

    def note(kind: type[Any]) -> Any:
        return lambda _, event: [str(event.key)] if isinstance(event, kind) else []

    stamps.wrap(Loads, "note", "worker: P has begun", note(do.Begun))
    stamps.wrap(Loads, "note", "worker: loaded", note(do.Loaded))
