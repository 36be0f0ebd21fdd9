"""Evaluation of hf_flash_backend: runs models end to end and renders the recorded results. See
`python -m eval --help`.
"""
