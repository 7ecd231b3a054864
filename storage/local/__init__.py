"""A storage in a directory of local files; files.py says what each module is for."""
