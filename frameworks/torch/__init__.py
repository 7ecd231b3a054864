"""A dataset of the service for PyTorch, without TensorFlow: service/trainers/pytorch.py."""

from ..service.trainers.pytorch import ServiceDataset

__all__ = ["ServiceDataset"]
