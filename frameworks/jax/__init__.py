"""A dataset of the service for JAX, without TensorFlow: service/trainers/jax_arrays.py."""

from ..service.extras import told_what_to_install

with told_what_to_install():
    from ..service.trainers.jax_arrays import ServiceDataset

__all__ = ["ServiceDataset"]
