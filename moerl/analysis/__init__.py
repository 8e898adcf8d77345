"""What reads runs and dumps: run folders, their comparison, the report."""
