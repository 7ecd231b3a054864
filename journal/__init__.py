"""Event sourcing: events in an append-only journal, with snapshots, on any storage."""
