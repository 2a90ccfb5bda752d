"""What `weft plan` is made of: the model's work, what-if questions, tables, recipes."""
