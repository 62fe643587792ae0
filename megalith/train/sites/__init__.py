"""Training across sites: what a merge computes, and how sites exchange what it needs."""
