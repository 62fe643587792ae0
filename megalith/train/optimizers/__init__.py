"""Rules of update, a module each, and the learning rate over the steps."""
