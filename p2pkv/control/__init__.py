"""The control plane: what ranks and proxies say to each other beside the KV itself."""
