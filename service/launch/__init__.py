"""Starts Forebay's workers where another system runs its own; docs/operations.md says how."""
