"""An emulated job: this process is the only real rank. Groups and channels emulate all others (NeuronaBox)."""
