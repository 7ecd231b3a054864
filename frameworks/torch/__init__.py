"""A dataset of the service for PyTorch, without TensorFlow: service/trainers/pytorch.py."""
