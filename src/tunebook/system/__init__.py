"""The machine and this process on it: devices, network, signals, files, and what must not be shown of them."""
