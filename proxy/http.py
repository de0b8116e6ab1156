"""Endpoints, and the headers of requests and answers that the proxy passes on. No IO."""

from __future__ import annotations

from multidict import CIMultiDict

# Where P computes the prompt, and where one instance does all there is.
PAIRED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
SINGLE = frozenset({"/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# Of these, where an engine computes nothing.
UNCOMPUTED = SINGLE - {"/v1/embeddings"}
# The streams in which each event has a name, errors too.
NAMED_EVENTS = frozenset({"/v1/messages", "/v1/responses"})

# Headers.

REQUEST_ID = "X-Request-Id"
# Under which the client's own id reaches the instances, for their logs.
CLIENT_ID = "X-Client-Request-Id"
PRIORITY = "X-Vllm-Priority"
REPLICA = "X-data-parallel-rank"

Headers = CIMultiDict[str]
