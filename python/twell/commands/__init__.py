"""What the command `twell` runs. Nothing here is an API."""
