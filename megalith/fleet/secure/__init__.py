"""Protection of a run from strangers: its key, private folders, and an authenticated store for its processes."""
