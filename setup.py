"""A shim for tools that still call setup.py; everything is said in setup.cfg."""

from setuptools import setup

setup()
