"""Models as plain single-device modules. No mesh, no rank, no process group."""
