"""The training loop, what every model shares, and one file per model."""
