"""Configuration: from arguments and YAML files to validated, plain values. The only place that knows Hydra."""
