"""Measurements. README.md shows the folders; each imports only those named before it:
jobs, rows, report. compare.py drives them."""
