"""Datasets of the service in Keras's `fit`, and their position in its checkpoints:
service/trainers/keras_data.py and keras_position.py."""

from ..service.trainers.keras_data import Epochs
from ..service.trainers.keras_position import KerasPosition as Position

__all__ = ["Epochs", "Position"]
