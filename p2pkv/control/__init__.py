"""The control plane: the messages between ranks and proxies, beside the KV itself."""
