"""ptfast: train PyTorch models from YAML recipes, as fast as the machine allows."""

__version__ = "0.1.0"
