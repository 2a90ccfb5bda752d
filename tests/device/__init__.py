"""An emulated CUDA device inside a CPU build of torch; see docs/device.md."""
