"""For convergence.py, early_steps.py and transformer_step.py: tasks with their data, optimizers, runs and tables."""
