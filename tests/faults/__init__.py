"""Seeded faults: small defects of the product that the tests must find; see docs/develop.md."""
