"""Entry points: train and fine-tune, serve prefill."""
