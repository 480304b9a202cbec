"""Time driver with the loss at hand: `micro_step`."""
