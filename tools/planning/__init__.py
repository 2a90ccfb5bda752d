"""Parts of `weft plan`: the model's work, what-if questions, tables, recipes."""
