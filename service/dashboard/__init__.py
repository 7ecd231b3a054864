"""The dashboard: pages for people on a dispatcher's HTTP port (docs/dashboard.md)."""
