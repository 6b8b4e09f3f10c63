"""What everything stands on: errors, files, console, command line, versions. No jax, no torch."""
