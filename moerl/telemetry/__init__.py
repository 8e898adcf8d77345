"""What a run says of itself: metric files, optional wandb, progress on the terminal, times, the summary."""
