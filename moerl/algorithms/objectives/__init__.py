"""What the policy term can be, one file each."""
