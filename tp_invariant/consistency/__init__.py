"""Do ranks agree: on their calls, their environment, their weights and their gradients."""
