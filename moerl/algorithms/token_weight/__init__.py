"""Token weights of the policy term, one file each: detached, [t]."""
