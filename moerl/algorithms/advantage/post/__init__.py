"""What is done to finished advantages, one file each."""
