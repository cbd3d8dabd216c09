"""From arguments and YAML files to a validated config of plain values; the only place that knows Hydra."""
