"""What people see and keep of a run."""
