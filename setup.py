"""Entry point for tools that call setup.py; pyproject.toml holds the metadata."""

from setuptools import setup

setup()
