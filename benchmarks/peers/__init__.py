"""Pipeline engines side by side: the same emulated layers in Weft, DeepSpeed and torch."""
