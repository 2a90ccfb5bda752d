"""The bubble board: what a rank computes and when it waits, in shared memory."""
