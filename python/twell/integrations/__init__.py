"""twell in other libraries' models; each module here needs the library it is named after."""
