"""For step.py: the optimizers that race, the models, the cost of a step by its parts, and the targets."""
