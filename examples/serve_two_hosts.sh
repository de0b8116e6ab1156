#!/usr/bin/env bash
# A P on one host, a D on another, the proxy on either. Not run between hosts yet.
#
#     (umask 077; openssl rand -hex 32 > p2pkv.secret)        # once; copy it to both hosts
#     export P2PKV_SECRET_FILE=p2pkv.secret PROXY=10.0.0.1
#     HERE=10.0.0.1 examples/serve_two_hosts.sh proxy
#     HERE=10.0.0.1 examples/serve_two_hosts.sh prefill path-or-name-of-a-model [more arguments for vLLM]
#     HERE=10.0.0.2 examples/serve_two_hosts.sh decode path-or-name-of-a-model [more arguments for vLLM]
#
# To see first whether the two hosts reach each other, and what a link between them carries:
#
#     p2pkv doctor --listen 10.0.0.1:21001 --secret-file p2pkv.secret       # on P's host
#     p2pkv doctor --connect 10.0.0.1:21001 --secret-file p2pkv.secret      # on D's host
#
# and once both serve: p2pkv doctor --pair 10.0.0.1:21001 10.0.0.2:21001 --secret-file p2pkv.secret
#
# HERE is this host's address that the other one can reach. Then talk to http://$PROXY:10001. The secret keeps
# strangers away; the KV itself travels in the clear (SECURITY.md). NCCL finds its network by itself;
# NCCL_SOCKET_IFNAME tells it which.
set -euo pipefail

WHAT=${1:?"say what to start: proxy, prefill or decode"}
: "${HERE:?"say this host's address, such as HERE=10.0.0.1"}"
: "${PROXY:?"say the proxy's address, such as PROXY=10.0.0.1"}"
: "${P2PKV_SECRET_FILE:?"say where the secret is: P2PKV_SECRET_FILE=p2pkv.secret"}"

HTTP_PORT=${HTTP_PORT:-8100}
KV_PORT=${KV_PORT:-21001}
DISCOVERY_PORT=30001

case $WHAT in
    proxy)
        exec p2pkv-proxy --host "$HERE" --port 10001 --discovery "$HERE:$DISCOVERY_PORT" \
            --secret-file "$P2PKV_SECRET_FILE"
        ;;
    prefill) ROLE=kv_producer ;;
    decode) ROLE=kv_consumer ;;
    *)
        echo "$WHAT is none of proxy, prefill and decode" >&2
        exit 2
        ;;
esac

MODEL=${2:?"say which model: examples/serve_two_hosts.sh $WHAT path-or-name"}
shift 2
# The GPU keeps room for staging and NCCL. If KV does not come, D computes the prompt itself.
exec vllm serve "$MODEL" --host "$HERE" --port "$HTTP_PORT" --gpu-memory-utilization 0.85 --shutdown-timeout 30 \
    --kv-transfer-config "{
        \"kv_connector\": \"P2pKvConnector\", \"kv_role\": \"$ROLE\", \"kv_port\": $KV_PORT,
        \"kv_load_failure_policy\": \"recompute\",
        \"kv_connector_extra_config\": {\"host\": \"$HERE\", \"secret_file\": \"$P2PKV_SECRET_FILE\",
            \"proxy_ip\": \"$PROXY\", \"proxy_port\": \"$DISCOVERY_PORT\", \"http_port\": \"$HTTP_PORT\"}}" "$@"
