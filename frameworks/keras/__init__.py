"""A dataset of the service for Keras on JAX or PyTorch: service/trainers/keras_data.py."""

from ..service.trainers.keras_data import Epochs

__all__ = ["Epochs"]
