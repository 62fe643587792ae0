"""The search for the best layout, and the published measurements that its predictions are checked against."""
