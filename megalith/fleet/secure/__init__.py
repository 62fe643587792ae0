"""What keeps strangers out of a run: its key, private folders, and an authenticated store for its processes."""
