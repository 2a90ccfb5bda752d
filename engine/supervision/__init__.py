"""What watches over a run: places of ranks, the culprit, agents and driver."""
