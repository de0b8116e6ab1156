#!/usr/bin/env bash
# One P and one D on this machine, without a GPU, behind vllm-router (PyPI) in place of p2pkv-proxy.
#
#     pip install vllm-router                    # best into an environment of its own
#     examples/vllm_router.sh path-or-name-of-a-model [more arguments for vLLM]
#
# MODE=write asks P and D at once (vllm-router's MoRI-IO mode); by default P answers first. ROUTER says where the
# program is. Then talk to http://127.0.0.1:10001 as you would to vLLM. Ctrl-C stops all three.
set -euo pipefail

MODEL=${1:?"say which model: examples/vllm_router.sh path-or-name [more arguments for vLLM]"}
shift

HOST=127.0.0.1
ROUTER=${ROUTER:-vllm-router}
ROUTER_PORT=10001
DISCOVERY_PORT=30001

case ${MODE:-default} in
    default) mode=() ;;
    write) mode=(--kv-connector moriio) ;;
    *)
        echo "MODE=$MODE is neither default nor write" >&2
        exit 2
        ;;
esac

# Two servers on few cores: one thread each, bound to no core, and memory (GiB) for the KV cache.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VLLM_CPU_OMP_THREADS_BIND=nobind
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}

serve() { # in a shell of its own: role http_port kv_port [arguments for vLLM]
    local role=$1 http_port=$2 kv_port=$3
    shift 3
    # The same options as with p2pkv-proxy: the ping is one that vllm-router reads. It reads no encrypted ones.
    exec python -m vllm.entrypoints.openai.api_server --model "$MODEL" --host "$HOST" --port "$http_port" \
        --enforce-eager --shutdown-timeout 10 --kv-transfer-config "{
            \"kv_connector\": \"P2pKvConnector\", \"kv_role\": \"$role\", \"kv_port\": $kv_port,
            \"kv_connector_extra_config\": {\"host\": \"$HOST\", \"discovery\": \"plain\",
                \"proxy_ip\": \"$HOST\", \"proxy_port\": \"$DISCOVERY_PORT\", \"http_port\": \"$http_port\"}}" "$@"
}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
"$ROUTER" --host "$HOST" --port "$ROUTER_PORT" --vllm-pd-disaggregation \
    --vllm-discovery-address "$HOST:$DISCOVERY_PORT" --policy round_robin "${mode[@]}" &
serve kv_producer 8100 21001 "$@" &
serve kv_consumer 8200 22001 "$@" &

until curl --noproxy '*' --silent --fail --output /dev/null "http://$HOST:$ROUTER_PORT/health"; do
    [ "$(jobs -rp | wc -l)" -eq 3 ] || { echo "one of the three has ended, see above"; exit 1; }
    sleep 1
done
echo "ready: http://$HOST:$ROUTER_PORT"
wait -n
