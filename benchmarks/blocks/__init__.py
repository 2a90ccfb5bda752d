"""A transformer block and its kernels, measured on one device."""
