"""The model before its first step: the same on every rank and engine, whole or partitioned, compiled or not.

A model config or a folder, a class and a seed come in; a model goes out. Adapters, checkpoints and the run
import it.
"""
