"""The host under a run: files, processes, ports, locks and measurements. Imports nothing else of Weft."""
