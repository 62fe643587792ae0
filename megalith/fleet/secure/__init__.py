"""Protection of a run from other users and hosts: its key, private folders, and an authenticated store for its processes."""
