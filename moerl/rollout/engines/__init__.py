"""One file per rollout engine; found by scanning, so there is no list to edit."""
