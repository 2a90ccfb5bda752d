"""Functions of the host: files, processes, ports, locks and measurements. They import nothing else of Weft."""
