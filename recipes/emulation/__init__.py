"""`weft emulate`: one machine stands for all ranks of a job."""
