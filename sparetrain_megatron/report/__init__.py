"""What a run leaves behind: events, a summary, and lines on the terminal."""
