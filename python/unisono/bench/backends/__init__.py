"""One file a backend, each one class of the protocol in `base`."""
