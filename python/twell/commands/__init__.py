"""The commands of `twell`. Nothing here is an API."""
