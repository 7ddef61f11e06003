"""What the optimizers share."""
