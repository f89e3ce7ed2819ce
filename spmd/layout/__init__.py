"""Where arrays live: layouts as data, their TOML spelling, and their application to a model's shapes."""
