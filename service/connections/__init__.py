"""Connections to dispatchers and workers."""
