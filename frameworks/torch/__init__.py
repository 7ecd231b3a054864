"""A dataset of the service for PyTorch, without TensorFlow: service/trainers/pytorch.py."""

from ..service.extras import told_what_to_install

with told_what_to_install():
    from ..service.trainers.pytorch import ServiceDataset

__all__ = ["ServiceDataset"]
