"""Training states: what they contain, their directories, and the settings that they record."""
