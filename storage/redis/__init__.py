"""A storage in a Redis; storage.py says what each module is for."""
