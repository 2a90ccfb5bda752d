"""The bubble board: when a rank computes and when it is idle, in shared memory."""
