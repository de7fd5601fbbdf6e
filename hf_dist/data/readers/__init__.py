"""One file -> rows or an Arrow table: a module with its `FORMATS` each, which `files` lists.

A path comes in; rows with their places go out, or an Arrow file in the cache, or a DataError with file and
line. `loading` imports it, and knows data sets, which a reader does not.
"""
