"""The ways to a dispatcher and to a worker."""
