"""`weft emulate`: a few real ranks on one machine stand for all ranks of a job."""
