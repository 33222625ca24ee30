"""The machine: its devices and cores, and the kernels that compute."""
