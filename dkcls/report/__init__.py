"""Reports on finished runs and on networks: tables, pictures, and pages with both."""
