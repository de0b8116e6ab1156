#!/usr/bin/env bash
# One P, one D and the proxy on this machine, without a GPU. Ctrl-C stops all three.
#
#     examples/serve_pair.sh path-or-name-of-a-model [more arguments for vLLM]
#
# Then talk to http://127.0.0.1:10001 as you would to vLLM. With P_ROLE=kv_both and D_ROLE=kv_both both instances prefill
# for each other, and decode.
set -euo pipefail

MODEL=${1:?"say which model: examples/serve_pair.sh path-or-name [more arguments for vLLM]"}
shift

HOST=127.0.0.1
PROXY_PORT=10001
DISCOVERY_PORT=30001

# Two servers on few cores: one thread each, bound to no core, and memory (GiB) for the KV cache.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VLLM_CPU_OMP_THREADS_BIND=nobind
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}

serve() { # in a shell of its own: role http_port kv_port [arguments for vLLM]
    local role=$1 http_port=$2 kv_port=$3
    shift 3
    exec python -m vllm.entrypoints.openai.api_server --model "$MODEL" --host "$HOST" --port "$http_port" \
        --enforce-eager --shutdown-timeout 10 --kv-transfer-config "{
            \"kv_connector\": \"P2pKvConnector\", \"kv_role\": \"$role\", \"kv_port\": $kv_port,
            \"kv_connector_extra_config\": {\"host\": \"$HOST\", \"proxy_ip\": \"$HOST\",
                \"proxy_port\": \"$DISCOVERY_PORT\", \"http_port\": \"$http_port\"}}" "$@"
}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
p2pkv-proxy --host "$HOST" --port "$PROXY_PORT" --discovery "$HOST:$DISCOVERY_PORT" &
serve "${P_ROLE:-kv_producer}" 8100 21001 "$@" &
serve "${D_ROLE:-kv_consumer}" 8200 22001 "$@" &

until curl --noproxy '*' --silent --fail --output /dev/null "http://$HOST:$PROXY_PORT/health?prefill=1&decode=1"; do
    [ "$(jobs -rp | wc -l)" -eq 3 ] || { echo "one of the three has ended, see above"; exit 1; }
    sleep 1
done
echo "ready: http://$HOST:$PROXY_PORT"
wait -n
