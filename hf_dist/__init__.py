"""hf_dist: fine-tune Hugging Face NLP models, exactly, on one CPU or many GPU nodes."""

__version__ = "0.1.0"
