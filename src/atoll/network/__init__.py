"""Addresses of engines. Certificates and overlay networks will live here."""
