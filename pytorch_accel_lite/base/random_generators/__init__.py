"""Random generators: where they are, their states and their seeds."""
