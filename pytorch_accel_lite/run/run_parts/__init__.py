"""What a run consists of: its data, progress, window of gradients, records, and how its time is spent."""
