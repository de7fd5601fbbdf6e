"""One word picks the engine: preset name -> DeepSpeed configuration -> files, and what is wrong in one.

A name or the path of a JSON comes in; a dict, a JSON or YAML text, or findings with their line go out.
Neither torch nor DeepSpeed is imported here; engines and the command line import it.
"""
