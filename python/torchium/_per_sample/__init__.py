"""Per-sample gradients."""
