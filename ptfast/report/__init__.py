"""Output of a run: terminal, HTML pages, loggers."""
