"""What ranks ask of the job's store when they start."""
