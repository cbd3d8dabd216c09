"""Turn arguments and YAML files into a validated config; the only package that uses Hydra."""
