"""A dataset of the service for JAX, without TensorFlow: service/trainers/jax_arrays.py."""

from ..service.trainers.jax_arrays import ServiceDataset

__all__ = ["ServiceDataset"]
