"""Packed checkpoints on disk: what is packed (`policy`), what a file looks like (`blob`), writing and reading.

`checkpoint` packs and unpacks a folder, `packed_file.PackedFile` gives an engine the planes of `..format`. Nothing here
multiplies, and no kernel imports it.
"""
