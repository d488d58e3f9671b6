"""twell in other libraries' models; each module needs the library of its name."""
