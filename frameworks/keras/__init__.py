"""Datasets of the service in Keras's `fit`, and their position in its checkpoints:
service/trainers/keras_data.py and keras_position.py."""

from ..service.extras import told_what_to_install

with told_what_to_install():
    from ..service.trainers.keras_data import Epochs
    from ..service.trainers.keras_position import KerasPosition as Position

__all__ = ["Epochs", "Position"]
