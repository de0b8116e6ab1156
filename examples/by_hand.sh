#!/usr/bin/env bash
# One request through a P and a D without any router: P first, to its end, then D with the same id.
#
#     examples/by_hand.sh model-name "a prompt"
#
# Needs the two servers of serve_pair.sh.
set -euo pipefail

MODEL=${1:?"say which model: examples/by_hand.sh model-name prompt"}
PROMPT=${2:-"Once upon a time"}

P_HTTP=127.0.0.1:8100 P_KV=127.0.0.1:21001
D_HTTP=127.0.0.1:8200 D_KV=127.0.0.1:22001

# Where P and D listen for each other, and 32 hex digits that are new for every request.
ID="___prefill_addr_${P_KV}___decode_addr_${D_KV}_$(python3 -c 'import uuid; print(uuid.uuid4().hex)')"

complete() { # address max_tokens
    python3 -c 'import json, sys; m, p, n = sys.argv[1:]
print(json.dumps({"model": m, "prompt": p, "max_tokens": int(n), "temperature": 0}))' "$MODEL" "$PROMPT" "$2" |
        curl --silent --show-error --fail-with-body "http://$1/v1/completions" \
            -H 'Content-Type: application/json' -H "X-Request-Id: $ID" -d @-
}

complete "$P_HTTP" 1 > /dev/null
complete "$D_HTTP" 32
echo
