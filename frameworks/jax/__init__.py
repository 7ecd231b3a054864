"""A dataset of the service for JAX, without TensorFlow: service/trainers/jax_arrays.py."""
