"""Which worker ends a prompt soonest: prefill costs, bubble patterns, placement, replay."""
