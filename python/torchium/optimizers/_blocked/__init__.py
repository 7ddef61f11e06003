"""What the optimizers have in common whose state is matrices of blocks: Shampoo and Adagrad."""
