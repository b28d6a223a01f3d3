"""Addresses of engines. Certificates, probes and overlay networks will live here."""
