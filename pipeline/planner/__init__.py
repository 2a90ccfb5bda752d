"""The planner: which sites, how many GPUs and which layout train a model, and what that costs."""
