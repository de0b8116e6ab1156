#!/usr/bin/env bash
# One P on GPU 0, one D on GPU 1 and the proxy on this machine. Ctrl-C stops all three. Two GPUs have not run it yet.
#
#     examples/serve_pair_gpus.sh path-or-name-of-a-model [more arguments for vLLM]
#
# Then talk to http://127.0.0.1:10001 as you would to vLLM. `make gpu-first-day` tries the machine first.
set -euo pipefail

MODEL=${1:?"say which model: examples/serve_pair_gpus.sh path-or-name [more arguments for vLLM]"}
shift

HOST=127.0.0.1
PROXY_PORT=10001
DISCOVERY_PORT=30001

serve() { # in a shell of its own: GPUs role http_port kv_port [arguments for vLLM]
    local gpus=$1 role=$2 http_port=$3 kv_port=$4
    shift 4
    CUDA_VISIBLE_DEVICES=$gpus exec vllm serve "$MODEL" --host "$HOST" --port "$http_port" \
        --shutdown-timeout 10 --kv-transfer-config "{
            \"kv_connector\": \"P2pKvConnector\", \"kv_role\": \"$role\", \"kv_port\": $kv_port,
            \"kv_connector_extra_config\": {\"host\": \"$HOST\", \"link\": \"nccl\", \"proxy_ip\": \"$HOST\",
                \"proxy_port\": \"$DISCOVERY_PORT\", \"http_port\": \"$http_port\"}}" "$@"
}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
p2pkv-proxy --host "$HOST" --port "$PROXY_PORT" --discovery "$HOST:$DISCOVERY_PORT" &
serve "${P_GPUS:-0}" kv_producer 8100 21001 "$@" &
serve "${D_GPUS:-1}" kv_consumer 8200 22001 "$@" &

until curl --noproxy '*' --silent --fail --output /dev/null "http://$HOST:$PROXY_PORT/health?prefill=1&decode=1"; do
    [ "$(jobs -rp | wc -l)" -eq 3 ] || { echo "one of the three has ended, see above"; exit 1; }
    sleep 1
done
echo "ready: http://$HOST:$PROXY_PORT"
wait -n
