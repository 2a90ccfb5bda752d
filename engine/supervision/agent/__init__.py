"""The agent of a host: its processes, their output and the reports to the driver."""
