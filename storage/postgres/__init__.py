"""A storage in a PostgreSQL; storage.py says what each module is for."""
